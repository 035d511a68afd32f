-- The jobs that are reserved under a token. Used after a COMMIT whose reply was lost. FOR UPDATE waits for the end of
-- the transaction, if the server is still carrying it out.
SELECT seq FROM multiq_jobs FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs}) AND token = {token} AND state = 2 AND place > {now}
FOR UPDATE
