UPDATE multiq_jobs FORCE INDEX (PRIMARY) SET state = 6, place = priority WHERE seq IN ({seqs})
