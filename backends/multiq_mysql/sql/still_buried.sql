-- After a COMMIT whose reply was lost: if one of these is not buried any more, it was done.
SELECT COUNT(*) FROM multiq_jobs FORCE INDEX (PRIMARY) WHERE seq IN ({seqs}) AND state = 3
