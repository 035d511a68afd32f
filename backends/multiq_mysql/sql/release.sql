-- The token stays, for the reason in migrations/0001. Assignments are made from left to right.
UPDATE multiq_jobs FORCE INDEX (PRIMARY)
SET priority = COALESCE({priority}, priority), reason = {reason},
    state = IF({delay} > 0, 1, 4), place = IF({delay} > 0, {now} + {delay}, priority)
WHERE seq IN ({seqs})
