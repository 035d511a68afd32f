UPDATE multiq_jobs SET reason = :reason WHERE seq = :seq
