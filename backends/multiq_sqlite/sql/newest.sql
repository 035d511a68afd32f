-- What the next enqueue would be given as seq, less one.
SELECT coalesce(max(seq), 0) FROM multiq_jobs
