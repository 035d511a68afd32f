-- The best ready jobs without gates, in the form of ready.sql.
SELECT json_group_array(json_array(
    seq, id, priority, ttr, attempt, crashes, kicks, enqueued_at, iif(body IS NULL, due_at, hex(body))
))
FROM (
    SELECT * FROM multiq_jobs INDEXED BY multiq_jobs_ready
    WHERE queue = :queue AND state = 0 AND due_at = 0
    ORDER BY priority, seq
    LIMIT :limit
)
