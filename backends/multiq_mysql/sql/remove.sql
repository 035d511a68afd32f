-- No hint, here and in the other deletes by seq: DELETE takes one only in its form for several tables, which reads a
-- small table whole.
DELETE FROM multiq_jobs
WHERE seq IN ({seqs})
