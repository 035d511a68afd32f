UPDATE multiq_jobs FORCE INDEX (PRIMARY) SET kicks = kicks + 1, state = 4, place = priority WHERE seq IN ({seqs})
