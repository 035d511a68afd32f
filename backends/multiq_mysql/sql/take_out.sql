-- Locks and reads a job for a reschedule. The reschedule then deletes the job and inserts it again, behind all other
-- jobs.
SELECT seq, state, place <= {now}, priority, ttr, body, unique_key, gates FROM multiq_jobs FORCE INDEX (multiq_jobs_id)
WHERE queue = {queue} AND id = {id}
FOR UPDATE
