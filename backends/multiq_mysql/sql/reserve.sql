-- Reserves the jobs that claim.sql has locked, under leases of one token. By primary key, so that the UPDATE locks only
-- these rows. Values are bounded (LEAST, GREATEST): another program may have written any value that its column holds,
-- and that must not make the statement fail.
UPDATE multiq_jobs FORCE INDEX (PRIMARY)
SET state = 2, token = {token}, attempt = LEAST(attempt, 4294967294) + 1, place = {now} + LEAST(GREATEST(ttr, 1000000), 3153600000000000)
WHERE seq IN ({seqs})
