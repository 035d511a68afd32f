-- A slice of the due jobs in one state, delayed or reserved. SKIP LOCKED: another process may be promoting the same
-- jobs, or carrying out a verdict on them.
SELECT seq FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
WHERE queue = {queue} AND state = {state} AND place <= {now}
ORDER BY place, seq
LIMIT {limit}
FOR UPDATE SKIP LOCKED
