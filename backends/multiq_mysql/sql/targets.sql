-- Locks the held jobs at which members arrive, in the order of their ids. Another transaction with arrivals at the same jobs
-- waits at this statement. So it waits before it reads which members have arrived.
SELECT seq, id, awaits, hold_delay > 0, priority FROM multiq_jobs FORCE INDEX (multiq_jobs_id)
WHERE queue = {queue} AND id IN ({ids}) AND state = 5
ORDER BY id
FOR UPDATE
