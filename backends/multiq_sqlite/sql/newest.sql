-- The highest seq; the next enqueue gets this plus one.
SELECT coalesce(max(seq), 0) FROM multiq_jobs
