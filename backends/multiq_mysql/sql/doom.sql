UPDATE multiq_jobs FORCE INDEX (PRIMARY) SET state = 4, place = priority, doomed = {reason} WHERE seq IN ({seqs})
