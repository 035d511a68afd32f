-- After a COMMIT whose reply was lost: which of these jobs are ours. FOR UPDATE waits until it has ended, if the server
-- is still at it.
SELECT seq FROM multiq_jobs FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs}) AND token = {token} AND state = 2 AND place > {now}
FOR UPDATE
