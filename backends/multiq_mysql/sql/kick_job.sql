-- A ready job stays unchanged. This includes a job that is due but not promoted yet. A buried job with a unique key also
-- stays unchanged, because the driver kicks it with other statements. Assignments are made from left to right, so kicks is
-- computed from the old state.
UPDATE multiq_jobs FORCE INDEX (multiq_jobs_id)
SET kicks = LEAST(kicks, 4294967294) + (state = 3), state = 4, place = priority
WHERE queue = {queue} AND id = {id}
    AND (state = 5 OR (state = 3 AND unique_key IS NULL) OR (state = 1 AND place > {now}))
