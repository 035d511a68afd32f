-- Reads the state of these jobs, and locks them until their verdicts are carried out.
SELECT seq, token, state, place > {now} FROM multiq_jobs FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs})
ORDER BY seq
FOR UPDATE
