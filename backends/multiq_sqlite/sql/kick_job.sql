-- A buried or delayed job.
UPDATE multiq_jobs SET kicks = kicks + (state = 3), state = 0, due_at = 0 WHERE seq = :seq
