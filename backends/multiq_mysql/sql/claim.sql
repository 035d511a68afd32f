-- The best jobs in one of the two ready states. The index gives the order, so only the rows that are handed out are
-- locked. A sort would lock the whole queue. SKIP LOCKED avoids a wait for rows that another consumer is claiming. The
-- numbers are one text, for the reason in look.sql.
SELECT CONCAT_WS(',', HEX(id), priority, seq, LEAST(GREATEST(ttr, 1000000), 3153600000000000), attempt, crashes, kicks, {now} - GREATEST(enqueued_at, 0)), body
FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
WHERE queue = {queue} AND state = {state} AND {condition}
ORDER BY place, seq
LIMIT {limit}
FOR UPDATE SKIP LOCKED
