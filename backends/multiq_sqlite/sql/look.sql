-- The outlook of each queue: [queue, paused until, any ready, next due, next end of a lease]. All are packed into one row,
-- because each fetched row gives up the interpreter's lock. Without INDEXED BY, the planner would read the whole queue,
-- because it does not see that state = 1 implies state <> 0. INDEXED BY also keeps an ANALYZE from changing the plan.
SELECT json_group_array(json_array(
    queue,
    (SELECT paused_until FROM multiq_queues WHERE multiq_queues.queue = asked.queue),
    EXISTS (SELECT 1 FROM multiq_jobs AS job INDEXED BY multiq_jobs_ready
            WHERE job.queue = asked.queue AND state = 0),
    (SELECT min(due_at) FROM multiq_jobs AS job INDEXED BY multiq_jobs_waiting
     WHERE job.queue = asked.queue AND state <> 0 AND state = 1),
    (SELECT min(due_at) FROM multiq_jobs AS job INDEXED BY multiq_jobs_waiting
     WHERE job.queue = asked.queue AND state <> 0 AND state = 2)
))
FROM (SELECT value AS queue FROM json_each(:queues)) AS asked
