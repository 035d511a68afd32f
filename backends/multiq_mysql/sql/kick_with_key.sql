UPDATE multiq_jobs FORCE INDEX (PRIMARY) SET kicks = LEAST(kicks, 4294967294) + 1, state = 4, place = priority
WHERE seq IN ({seqs})
