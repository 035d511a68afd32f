-- The best ready jobs, packed into one row for the reason in look.sql. Bodies are in hex. A large body is null.
SELECT json_group_array(json_array(
    seq, id, priority, ttr, attempt, crashes, kicks, enqueued_at, iif(body IS NULL, NULL, hex(body))
))
FROM (
    SELECT * FROM multiq_jobs INDEXED BY multiq_jobs_ready
    WHERE queue = :queue AND state = 0
    ORDER BY priority, seq
    LIMIT :limit
)
