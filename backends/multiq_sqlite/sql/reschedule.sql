-- Makes the job look as if it were enqueued now, with a new age and all counts at zero.
UPDATE multiq_jobs
SET seq = :newest, state = :state, due_at = :due_at, enqueued_at = :now,
    attempt = 0, crashes = 0, kicks = 0, token = NULL, reason = NULL
WHERE seq = :seq
