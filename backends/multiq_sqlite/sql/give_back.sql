UPDATE multiq_jobs SET state = 0, due_at = 0, token = NULL, attempt = attempt - 1
WHERE seq IN (SELECT value FROM json_each(:seqs))
