-- Locks parked jobs that no other session has locked.
SELECT seq FROM multiq_jobs FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs}) AND state = 6
ORDER BY seq
FOR UPDATE SKIP LOCKED
