UPDATE multiq_jobs SET due_at = :now + ttr WHERE seq IN (SELECT value FROM json_each(:seqs))
