UPDATE multiq_jobs FORCE INDEX (PRIMARY) SET state = 3, reason = {reason}, detail = NULL, place = {place} WHERE seq IN ({seqs})
