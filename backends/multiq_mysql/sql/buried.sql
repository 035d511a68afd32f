-- A slice of the jobs that were buried when the kick began, the longest buried first. Jobs that are buried later are left
-- out. So the kick ends even if other consumers bury jobs at the same time.
SELECT seq FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
WHERE queue = {queue} AND state = 3 AND place < {place}
ORDER BY place, seq
LIMIT {limit}
FOR UPDATE SKIP LOCKED
