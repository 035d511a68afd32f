-- In this form for the hint's sake, as in ack.sql. The second condition is always true: where only the key is asked for
-- MariaDB reads all of a small table in spite of the hint.
DELETE job FROM multiq_jobs AS job FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs}) AND state < 8
