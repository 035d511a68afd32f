UPDATE multiq_jobs
SET state = 0, due_at = 0, token = NULL, crashes = crashes + 1, reason = :reason
WHERE seq = :seq
