-- Waits until nobody else is at work on these. The state is read for the reason that remove.sql tells.
SELECT seq, state FROM multiq_jobs FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs})
FOR UPDATE
