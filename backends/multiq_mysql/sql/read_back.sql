-- After a COMMIT whose reply was lost: which of these jobs are ours.
SELECT seq FROM multiq_jobs FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs}) AND token = {token} AND state = 2 AND place > {now}
