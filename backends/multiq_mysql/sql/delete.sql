-- Deletes a job if it is not reserved, or if its lease has ended. The driver deletes parked jobs with other statements.
DELETE job FROM multiq_jobs AS job FORCE INDEX (multiq_jobs_id)
WHERE queue = {queue} AND id = {id} AND state <> 6 AND (state <> 2 OR place <= {now})
