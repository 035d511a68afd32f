-- A job that is not reserved, or whose lease has ended.
DELETE job FROM multiq_jobs AS job FORCE INDEX (multiq_jobs_id)
WHERE queue = {queue} AND id = {id} AND (state <> 2 OR place <= {now})
