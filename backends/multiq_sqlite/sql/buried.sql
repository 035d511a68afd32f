-- A slice of the buried, the longest buried first. It asks for the oldest each time, so that slices need no cursor.
SELECT json_group_array(seq), count(*)
FROM (
    SELECT seq FROM multiq_jobs INDEXED BY multiq_jobs_waiting
    WHERE queue = :queue AND state <> 0 AND state = 3
    ORDER BY due_at, seq
    LIMIT :limit
)
