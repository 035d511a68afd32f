-- Stores a detail. The verdict's own statement comes before this statement and deletes the older detail. memo.sql
-- explains why there are two statements.
UPDATE multiq_jobs FORCE INDEX (PRIMARY) SET detail = {detail} WHERE seq IN ({seqs})
