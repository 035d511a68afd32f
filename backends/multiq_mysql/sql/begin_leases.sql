-- Begins the leases of the jobs that reserve.sql or reserve_gated.sql has locked. All of them have one token. The UPDATE
-- finds the jobs by primary key, so it locks only their rows. LEAST and GREATEST bound the values, because another program
-- may have written any value that fits the column. The statement must not fail because of such a value.
UPDATE multiq_jobs FORCE INDEX (PRIMARY)
SET state = 2, token = {token}, attempt = LEAST(attempt, 4294967294) + 1, place = {now} + LEAST(GREATEST(ttr, 1000000), 3153600000000000)
WHERE seq IN ({seqs})
