SELECT COALESCE(MAX(seq), 0) FROM multiq_jobs
