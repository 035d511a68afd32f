-- A page of ready jobs in the order of reserve, after the last job of the page before. It reads two ranges of the index:
-- the rest of one priority, and all later priorities. With `(priority, seq) > (:major, :minor)` SQLite would read from the
-- beginning of the priority. A page deep in a long queue would then cost as much as all pages before it.
SELECT seq, id, state, priority, due_at, ttr, enqueued_at, attempt, crashes, kicks, reason,
    CAST(coalesce(body, (SELECT body FROM multiq_bodies WHERE multiq_bodies.seq = job.seq)) AS BLOB)
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
    LIMIT :limit
) AS job
