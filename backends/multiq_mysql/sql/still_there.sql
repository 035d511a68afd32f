-- After a COMMIT whose reply was lost: how many of these were not removed.
SELECT COUNT(*) FROM multiq_jobs FORCE INDEX (PRIMARY) WHERE seq IN ({seqs})
