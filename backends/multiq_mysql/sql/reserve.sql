-- The jobs that claim.sql has locked, under leases of one token. By primary key, for so tables lock no rows but these.
UPDATE multiq_jobs FORCE INDEX (PRIMARY)
SET state = 2, token = {token}, attempt = attempt + 1, place = {now} + ttr
WHERE seq IN ({seqs})
