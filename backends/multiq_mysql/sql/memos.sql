-- Returns the memos that reserve.sql has cut off. reserve.sql has locked their rows.
SELECT seq, memo FROM multiq_jobs FORCE INDEX (PRIMARY) WHERE seq IN ({seqs})
