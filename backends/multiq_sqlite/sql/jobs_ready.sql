-- A page of ready jobs in the order in which they are reserved, after the last job of the previous page. It reads two index
-- ranges: the rest of one priority, and all later priorities. With `(priority, seq) > (:major, :minor)` SQLite would read
-- from the beginning of the priority. A page deep in a long queue would then cost as much as all pages before it. Parked
-- jobs come last: their major is 4294967296.
SELECT seq, id, state, priority, due_at, ttr, enqueued_at, attempt, crashes, kicks, reason,
    CAST(coalesce(body, (SELECT body FROM multiq_bodies WHERE multiq_bodies.seq = job.seq)) AS BLOB),
    iif(body IS NULL, (SELECT CAST(memo AS BLOB) FROM multiq_memos WHERE multiq_memos.seq = job.seq), NULL),
    iif(body IS NULL, (SELECT CAST(detail AS BLOB) FROM multiq_memos WHERE multiq_memos.seq = job.seq), NULL),
    0,
    iif(body IS NULL, (SELECT unique_key FROM multiq_memos WHERE multiq_memos.seq = job.seq), NULL)
FROM (
    SELECT * FROM (
        SELECT * FROM multiq_jobs INDEXED BY multiq_jobs_ready
        WHERE queue = :queue AND state = 0 AND priority = :major AND seq > :minor
        ORDER BY seq
        LIMIT :limit
    )
    UNION ALL
    SELECT * FROM (
        SELECT * FROM multiq_jobs INDEXED BY multiq_jobs_ready
        WHERE queue = :queue AND state = 0 AND priority > :major
        ORDER BY priority, seq
        LIMIT :limit
    )
    UNION ALL
    SELECT * FROM (
        SELECT * FROM multiq_jobs INDEXED BY multiq_jobs_waiting
        WHERE queue = :queue AND state <> 0 AND state = 5 AND due_at = 0
            AND seq > iif(:major > 4294967295, :minor, -9223372036854775808)
        ORDER BY seq
        LIMIT :limit
    )
    LIMIT :limit
) AS job
