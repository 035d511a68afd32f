-- The token does not change: migrations/0001 gives the reason. Assignments are made from left to right.
UPDATE multiq_jobs FORCE INDEX (PRIMARY)
SET priority = COALESCE({priority}, priority), reason = {reason}, detail = NULL,
    state = IF({delay} > 0, 1, 4), place = IF({delay} > 0, {now} + {delay}, priority)
WHERE seq IN ({seqs})
