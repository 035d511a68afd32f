-- A slice of the due jobs in one state, delayed or reserved. SKIP LOCKED leaves out jobs that another process is
-- promoting, or on which it is carrying out a verdict.
SELECT seq FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
WHERE queue = {queue} AND state = {state} AND place <= {now}
ORDER BY place, seq
LIMIT {limit}
FOR UPDATE SKIP LOCKED
