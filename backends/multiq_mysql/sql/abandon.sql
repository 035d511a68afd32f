UPDATE multiq_jobs FORCE INDEX (PRIMARY)
SET crashes = LEAST(crashes, 4294967294) + 1, reason = {reason}, detail = NULL, state = 4, place = priority
WHERE seq IN ({seqs})
