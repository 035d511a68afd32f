-- A slice of what was there when the purge began: a busy producer must not keep it going for ever.
DELETE FROM multiq_jobs
WHERE seq IN (
    SELECT seq FROM multiq_jobs INDEXED BY multiq_jobs_ready
    WHERE queue = :queue AND state = 0 AND seq <= :newest
    LIMIT :limit
)
