UPDATE multiq_jobs SET state = 5, due_at = 0 WHERE seq = :seq
