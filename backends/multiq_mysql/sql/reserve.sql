-- The best jobs in one of the two ready states. The index gives the order, so only the rows that are handed out are locked.
-- A sort would lock the whole queue. With SKIP LOCKED, the statement does not wait for rows that another consumer is
-- claiming. All columns but the body are joined into one text: look.sql gives the reason. After the numbers, the text
-- has the memo, the reason of a doomed job and the gates. The memo is in hex, and is cut off if it is large. CONCAT_WS
-- leaves out each of the three that is NULL. A reason begins with an exclamation mark, and the gates begin with another
-- mark. So the driver can tell the three apart. This costs a claim 5 us. IF and COALESCE instead of the marks would
-- cost 14 us. The driver bounds ttr and makes the age from enqueued_at. In this statement, both would cost 0.3 us for
-- each job.
SELECT CONCAT_WS(',', HEX(id), priority, seq, ttr, attempt, crashes, kicks, enqueued_at,
    JSON_QUOTE(HEX(LEFT(memo, {inline}))), JSON_QUOTE(doomed), JSON_QUOTE(gates)), body
FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
WHERE queue = {queue} AND state = {state} AND {condition}
ORDER BY place, seq
LIMIT {limit}
FOR UPDATE SKIP LOCKED
