-- Stores a memo. This is a separate statement, because a memo, a detail and a reason may not fit into one packet together.
UPDATE multiq_jobs FORCE INDEX (PRIMARY) SET memo = {memo} WHERE seq IN ({seqs})
