-- Locks these rows, and so waits for other transactions that have locked them. The state is read for the reason given
-- in remove.sql.
SELECT seq, state FROM multiq_jobs FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs})
FOR UPDATE
