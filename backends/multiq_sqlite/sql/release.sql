UPDATE multiq_jobs
SET state = :state, due_at = :due_at, token = NULL, priority = coalesce(:priority, priority), reason = :reason
WHERE seq = :seq
