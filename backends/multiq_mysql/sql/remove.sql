-- The multiple-table form of DELETE accepts the index hint, as in ack.sql. The second condition is always true. Without it,
-- the statement would read only the key, and MariaDB would then scan all of a small table in spite of the hint.
DELETE job FROM multiq_jobs AS job FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs}) AND state < 8
