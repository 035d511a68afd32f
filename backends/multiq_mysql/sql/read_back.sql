-- After a COMMIT whose reply was lost: the jobs that are reserved under our token. FOR UPDATE waits for that
-- transaction's end, if the server is still carrying it out.
SELECT seq FROM multiq_jobs FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs}) AND token = {token} AND state = 2 AND place > {now}
FOR UPDATE
