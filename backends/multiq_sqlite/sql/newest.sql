-- The highest seq. The next job gets this number plus one.
SELECT coalesce(max(seq), 0) FROM multiq_jobs
