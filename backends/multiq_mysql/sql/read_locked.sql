-- Returns the columns of reserve.sql, for jobs that this transaction has locked.
SELECT CONCAT_WS(',', HEX(id), priority, seq, ttr, attempt, crashes, kicks, enqueued_at,
    JSON_QUOTE(HEX(LEFT(memo, {inline}))), JSON_QUOTE(doomed), JSON_QUOTE(gates)), body
FROM multiq_jobs FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs})
