-- Jumps from name to name through the index. A SELECT DISTINCT would read every job.
WITH RECURSIVE named (queue) AS (
    SELECT min(queue) FROM multiq_jobs
    UNION ALL
    SELECT (SELECT min(queue) FROM multiq_jobs WHERE multiq_jobs.queue > named.queue)
    FROM named WHERE named.queue IS NOT NULL
)
SELECT queue FROM named WHERE queue IS NOT NULL
UNION
SELECT queue FROM multiq_queues WHERE paused_until > :now
ORDER BY 1
