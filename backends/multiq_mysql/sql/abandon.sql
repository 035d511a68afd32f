UPDATE multiq_jobs FORCE INDEX (PRIMARY)
SET crashes = crashes + 1, reason = {reason}, state = 4, place = priority
WHERE seq IN ({seqs})
