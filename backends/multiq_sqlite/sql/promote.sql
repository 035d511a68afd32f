-- A slice of what is due in one state, delayed or reserved, becomes ready. A lease that ended counts as a crash.
UPDATE multiq_jobs
SET state = 0, due_at = 0, token = NULL, crashes = crashes + (state = 2)
WHERE seq IN (
    SELECT seq FROM multiq_jobs INDEXED BY multiq_jobs_waiting
    WHERE queue = :queue AND state <> 0 AND state = :state AND due_at <= :now
    LIMIT :limit
)
