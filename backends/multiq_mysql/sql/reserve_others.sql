-- Locks the jobs that others.sql has found, if they are still ready behind the same job.
SELECT seq, gates FROM multiq_jobs FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs}) AND queue = {queue} AND state IN (0, 4) AND place = {place} AND seq > {seq} AND gates IS NOT NULL
ORDER BY seq
FOR UPDATE SKIP LOCKED
