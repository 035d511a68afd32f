-- Assignments are made from left to right.
UPDATE multiq_jobs FORCE INDEX (PRIMARY)
SET attempt = attempt - 1, state = IF({delay} > 0, 1, 4), place = IF({delay} > 0, {now} + {delay}, priority)
WHERE seq IN ({seqs})
