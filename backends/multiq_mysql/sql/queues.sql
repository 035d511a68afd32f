-- Jumps from name to name through the index. A SELECT DISTINCT might read every job.
SELECT queue FROM multiq_jobs GROUP BY queue
UNION
SELECT queue FROM multiq_queues WHERE paused_until > {now}
ORDER BY 1
