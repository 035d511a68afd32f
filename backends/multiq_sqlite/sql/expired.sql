-- A slice of the expired outcomes of a queue, of either kind.
SELECT json_group_array(seq), count(*)
FROM (
    SELECT * FROM (
        SELECT seq FROM multiq_outcomes INDEXED BY multiq_outcomes_expiry
        WHERE queue = :queue AND kind = 0 AND expires_at <= :now
        LIMIT :limit
    )
    UNION ALL
    SELECT * FROM (
        SELECT seq FROM multiq_outcomes INDEXED BY multiq_outcomes_expiry
        WHERE queue = :queue AND kind = 1 AND expires_at <= :now
        LIMIT :limit
    )
    LIMIT :limit
)
