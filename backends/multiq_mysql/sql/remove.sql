-- In this form for the hint's sake, as in ack.sql.
DELETE job FROM multiq_jobs AS job FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs})
