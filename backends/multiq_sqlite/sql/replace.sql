-- Gives a waiting job the data of another enqueue. The job keeps its age and position.
UPDATE multiq_jobs
SET state = :state, due_at = :due_at, priority = :priority, ttr = :ttr, token = NULL,
    attempt = 0, crashes = 0, kicks = 0, reason = NULL
WHERE seq = :seq
