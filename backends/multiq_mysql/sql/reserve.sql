-- Bounded: what another program has written may be anything that its column holds, and must not end the statement.
-- The jobs that claim.sql has locked, under leases of one token. By primary key, for so tables lock no rows but these.
UPDATE multiq_jobs FORCE INDEX (PRIMARY)
SET state = 2, token = {token}, attempt = LEAST(attempt, 4294967294) + 1, place = {now} + LEAST(GREATEST(ttr, 1000000), 3153600000000000)
WHERE seq IN ({seqs})
