-- Returns the memos that claim.sql has cut off. claim.sql has locked their rows.
SELECT seq, memo FROM multiq_jobs FORCE INDEX (PRIMARY) WHERE seq IN ({seqs})
