-- A ready job stays unchanged, also if it is due and not promoted yet. Assignments are made from left to right, so kicks
-- is computed from the old state.
UPDATE multiq_jobs FORCE INDEX (multiq_jobs_id)
SET kicks = LEAST(kicks, 4294967294) + (state = 3), state = 4, place = priority
WHERE queue = {queue} AND id = {id} AND (state = 3 OR (state = 1 AND place > {now}))
