-- The best jobs of one kind of ready ones. The index gives the order, so that no more rows are locked than are handed
-- out: a sort would lock the whole queue. SKIP LOCKED: what another consumer is just taking is not waited for.
-- In one text, as in look.sql.
SELECT CONCAT_WS(',', HEX(id), priority, seq, LEAST(GREATEST(ttr, 1000000), 3153600000000000), attempt, crashes, kicks, {now} - GREATEST(enqueued_at, 0)), body
FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
WHERE queue = {queue} AND state = {state} AND {condition}
ORDER BY place, seq
LIMIT {limit}
FOR UPDATE SKIP LOCKED
