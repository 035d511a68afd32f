-- A slice of the buried jobs, the longest buried first. A kick removes its slice, so the next slice needs no cursor.
SELECT json_group_array(seq), count(*)
FROM (
    SELECT seq FROM multiq_jobs INDEXED BY multiq_jobs_waiting
    WHERE queue = :queue AND state <> 0 AND state = 3
    ORDER BY due_at, seq
    LIMIT :limit
)
