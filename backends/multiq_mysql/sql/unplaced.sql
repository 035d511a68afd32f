-- Finds ready jobs that have gates, and that no reserve has read yet.
SELECT gates, COUNT(*) FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
WHERE queue = {queue} AND state IN (0, 4) AND gates IS NOT NULL
GROUP BY gates
