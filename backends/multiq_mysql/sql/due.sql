-- A slice of what is due in one state, delayed or reserved. SKIP LOCKED: another process promotes the same ones, or a
-- verdict is just being carried out.
SELECT seq FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
WHERE queue = {queue} AND state = {state} AND place <= {now}
ORDER BY place, seq
LIMIT {limit}
FOR UPDATE SKIP LOCKED
