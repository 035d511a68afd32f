-- The best ready jobs, in one of the two ready states, for a queue with limits. reserve.sql explains the form.
SELECT priority, seq, gates FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
WHERE queue = {queue} AND state = {state} AND {condition}
ORDER BY place, seq
LIMIT {limit}
FOR UPDATE SKIP LOCKED
