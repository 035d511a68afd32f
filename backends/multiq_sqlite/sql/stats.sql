-- Counts ranges of the two partial indexes, and does not read the jobs' rows. Due jobs count as ready, even if they are not
-- promoted yet.
WITH waiting (state, is_due, jobs) AS (
    SELECT state, state < 3 AND due_at <= :now, count(*)
    FROM multiq_jobs INDEXED BY multiq_jobs_waiting
    WHERE queue = :queue AND state <> 0
    GROUP BY 1, 2
)
SELECT
    (SELECT count(*) FROM multiq_jobs INDEXED BY multiq_jobs_ready WHERE queue = :queue AND state = 0)
        + coalesce((SELECT sum(jobs) FROM waiting WHERE is_due OR state = 5), 0),
    coalesce((SELECT sum(jobs) FROM waiting WHERE state = 1 AND NOT is_due), 0),
    coalesce((SELECT sum(jobs) FROM waiting WHERE state = 2 AND NOT is_due), 0),
    coalesce((SELECT sum(jobs) FROM waiting WHERE state = 3), 0),
    coalesce((SELECT sum(jobs) FROM waiting WHERE state = 4), 0),
    (SELECT paused_until FROM multiq_queues WHERE queue = :queue)
