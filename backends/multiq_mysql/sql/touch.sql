UPDATE multiq_jobs FORCE INDEX (PRIMARY) SET place = {now} + ttr WHERE seq IN ({seqs})
