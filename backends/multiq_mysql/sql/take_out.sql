-- For reschedule, which puts the job in again at the end of the line.
SELECT seq, state, place <= {now}, priority, ttr, body FROM multiq_jobs FORCE INDEX (multiq_jobs_id)
WHERE queue = {queue} AND id = {id}
FOR UPDATE
