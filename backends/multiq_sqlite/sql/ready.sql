-- The best ready jobs, packed into one row: look.sql gives the reason. Bodies are in hex. If the body is stored in
-- another table, the last column is due_at, which is 1 if the job has gates, and otherwise 0.
SELECT json_group_array(json_array(
    seq, id, priority, ttr, attempt, crashes, kicks, enqueued_at, iif(body IS NULL, due_at, hex(body))
))
FROM (
    SELECT * FROM multiq_jobs INDEXED BY multiq_jobs_ready
    WHERE queue = :queue AND state = 0
    ORDER BY priority, seq
    LIMIT :limit
)
