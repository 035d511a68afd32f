-- Makes due jobs ready. If the job's lease has ended, this counts as a crash, and the lease's token becomes void.
-- Assignments are made from left to right.
UPDATE multiq_jobs FORCE INDEX (PRIMARY)
SET crashes = LEAST(crashes, 4294967294) + (state = 2), token = 0, state = 4, place = priority
WHERE seq IN ({seqs})
