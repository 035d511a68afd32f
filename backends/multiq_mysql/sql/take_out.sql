-- For reschedule, which inserts the job again behind all others.
SELECT seq, state, place <= {now}, priority, ttr, body FROM multiq_jobs FORCE INDEX (multiq_jobs_id)
WHERE queue = {queue} AND id = {id}
FOR UPDATE
