-- A slice of the buried, the longest buried first. It asks for the oldest each time, so that slices need no cursor.
UPDATE multiq_jobs
SET state = 0, due_at = 0, kicks = kicks + 1
WHERE seq IN (
    SELECT seq FROM multiq_jobs INDEXED BY multiq_jobs_waiting
    WHERE queue = :queue AND state <> 0 AND state = 3
    ORDER BY due_at, seq
    LIMIT :limit
)
