-- Returns up to :limit keys of a limit, beginning at :first, for which jobs wait. The statement jumps from key to key
-- through the index, and does not read the jobs.
WITH RECURSIVE lines (key) AS (
    SELECT min(key) FROM multiq_gates INDEXED BY multiq_gates_lines
    WHERE queue = :queue AND name = :name AND priority IS NOT NULL AND multiq_gates.key >= :first
    UNION ALL
    SELECT (
        SELECT min(key) FROM multiq_gates INDEXED BY multiq_gates_lines
        WHERE queue = :queue AND name = :name AND priority IS NOT NULL AND multiq_gates.key > lines.key
    )
    FROM lines WHERE key IS NOT NULL
)
SELECT CAST(key AS BLOB) FROM lines WHERE key IS NOT NULL LIMIT :limit
