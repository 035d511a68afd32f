-- A page of delayed, reserved or buried jobs, after the last job of the page before. jobs_ready.sql explains the two
-- ranges.
SELECT seq, id, state, priority, due_at, ttr, enqueued_at, attempt, crashes, kicks, reason,
    CAST(coalesce(body, (SELECT body FROM multiq_bodies WHERE multiq_bodies.seq = job.seq)) AS BLOB)
FROM (
    SELECT * FROM (
        SELECT * FROM multiq_jobs INDEXED BY multiq_jobs_waiting
        WHERE queue = :queue AND state <> 0 AND state = :state AND due_at = :major AND seq > :minor
        ORDER BY seq
        LIMIT :limit
    )
    UNION ALL
    SELECT * FROM (
        SELECT * FROM multiq_jobs INDEXED BY multiq_jobs_waiting
        WHERE queue = :queue AND state <> 0 AND state = :state AND due_at > :major
        ORDER BY due_at, seq
        LIMIT :limit
    )
    LIMIT :limit
) AS job
