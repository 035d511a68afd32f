UPDATE multiq_jobs FORCE INDEX (PRIMARY) SET awaits = {awaits} WHERE seq IN ({seqs})
