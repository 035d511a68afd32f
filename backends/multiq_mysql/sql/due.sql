-- A slice of the due jobs in one state, delayed or reserved. SKIP LOCKED leaves out a job if another process is promoting
-- it, or is carrying out a verdict on it.
SELECT seq FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
WHERE queue = {queue} AND state = {state} AND place <= {now}
ORDER BY place, seq
LIMIT {limit}
FOR UPDATE SKIP LOCKED
