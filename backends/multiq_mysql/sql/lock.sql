-- Waits until nobody else is at work on these.
SELECT seq FROM multiq_jobs FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs})
FOR UPDATE
