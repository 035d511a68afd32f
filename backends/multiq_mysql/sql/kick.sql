-- Kicks jobs without unique keys. Jobs with unique keys stay buried here, because the driver kicks them with other
-- statements.
UPDATE multiq_jobs FORCE INDEX (PRIMARY) SET kicks = LEAST(kicks, 4294967294) + 1, state = 4, place = priority
WHERE seq IN ({seqs}) AND unique_key IS NULL
