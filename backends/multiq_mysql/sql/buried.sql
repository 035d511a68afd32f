-- A slice of the buried, the longest buried first.
SELECT seq FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
WHERE queue = {queue} AND state = 3
ORDER BY place, seq
LIMIT {limit}
FOR UPDATE SKIP LOCKED
