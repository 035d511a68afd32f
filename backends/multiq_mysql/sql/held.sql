-- Reads the state of these jobs, and locks them until their verdicts are carried out. The time is read for each row, after a
-- possible wait for the row's lock. If a lease has ended during the wait, it must not be touched, because its slot may
-- already be used by another job.
SELECT seq, token, state, place > {now} FROM multiq_jobs FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs})
ORDER BY seq
FOR UPDATE
