-- A page of the outcomes of one kind, after the last outcome of the previous page. The outcome that expires last comes
-- first. jobs_ready.sql explains the two ranges.
SELECT seq, id, kind, attempt, kept_at, expires_at, CAST(body AS BLOB)
FROM (
    SELECT * FROM (
        SELECT * FROM multiq_outcomes INDEXED BY multiq_outcomes_expiry
        WHERE queue = :queue AND kind = :kind AND expires_at = :major AND :major > :now AND seq < :minor
        ORDER BY seq DESC
        LIMIT :limit
    )
    UNION ALL
    SELECT * FROM (
        SELECT * FROM multiq_outcomes INDEXED BY multiq_outcomes_expiry
        WHERE queue = :queue AND kind = :kind AND expires_at < :major AND expires_at > :now
        ORDER BY expires_at DESC, seq DESC
        LIMIT :limit
    )
    LIMIT :limit
)
