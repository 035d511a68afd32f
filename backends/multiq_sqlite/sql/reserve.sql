-- The jobs that ready.sql found, in the same transaction, under leases of one token.
UPDATE multiq_jobs
SET state = 2, token = :token, due_at = :now + ttr, attempt = attempt + 1
WHERE seq IN (SELECT value FROM json_each(:seqs))
