-- In this statement, due_at is a position behind all buried jobs. A time cannot be used as the position, because a clock can
-- stand still or go back, and because all jobs of a batch have the same time.
UPDATE multiq_jobs
SET state = 3, token = NULL, reason = :reason, due_at = 1 + coalesce((
    SELECT max(due_at) FROM multiq_jobs AS buried INDEXED BY multiq_jobs_waiting
    WHERE buried.queue = multiq_jobs.queue AND buried.state <> 0 AND buried.state = 3
), 0)
WHERE seq = :seq
