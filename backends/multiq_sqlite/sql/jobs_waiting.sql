-- A page of delayed, reserved, buried or held jobs, after the last job of the previous page. jobs_ready.sql explains the
-- two ranges.
SELECT seq, id, state, priority, due_at, ttr, enqueued_at, attempt, crashes, kicks, reason,
    CAST(coalesce(body, (SELECT body FROM multiq_bodies WHERE multiq_bodies.seq = job.seq)) AS BLOB),
    iif(body IS NULL, (SELECT CAST(memo AS BLOB) FROM multiq_memos WHERE multiq_memos.seq = job.seq), NULL),
    iif(body IS NULL, (SELECT CAST(detail AS BLOB) FROM multiq_memos WHERE multiq_memos.seq = job.seq), NULL),
    iif(state = 4, (SELECT awaits FROM multiq_terms WHERE multiq_terms.seq = job.seq), 0),
    iif(body IS NULL, (SELECT unique_key FROM multiq_memos WHERE multiq_memos.seq = job.seq), NULL)
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
