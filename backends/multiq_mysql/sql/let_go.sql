-- Releases held jobs after their last arrivals. Assignments are made from left to right.
UPDATE multiq_jobs FORCE INDEX (PRIMARY)
SET state = IF(hold_delay > 0, 1, 4), place = IF(hold_delay > 0, {now} + hold_delay, priority)
WHERE seq IN ({seqs})
