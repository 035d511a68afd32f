-- A job that nobody runs; one whose lease has ended is run by nobody.
DELETE job FROM multiq_jobs AS job FORCE INDEX (multiq_jobs_id)
WHERE queue = {queue} AND id = {id} AND (state <> 2 OR place <= {now})
