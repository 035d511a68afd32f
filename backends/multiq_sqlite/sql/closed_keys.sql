-- A slice of the keys of a limit. Only keys for which lines of fair limits wait are included. lines.sql explains the form.
WITH RECURSIVE closed (key) AS (
    SELECT min(closed_key) FROM multiq_turns INDEXED BY multiq_turns_closed
    WHERE queue = :queue AND closed_name IS NOT NULL AND closed_name = :name AND closed_key >= :first
    UNION ALL
    SELECT (
        SELECT min(closed_key) FROM multiq_turns INDEXED BY multiq_turns_closed
        WHERE queue = :queue AND closed_name IS NOT NULL AND closed_name = :name AND closed_key > closed.key
    )
    FROM closed WHERE key IS NOT NULL
)
SELECT CAST(key AS BLOB) FROM closed WHERE key IS NOT NULL LIMIT :limit
