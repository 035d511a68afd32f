-- The outlook of each queue: [queue, paused until, any ready, next due, next end of a lease]. If the queue may have jobs
-- with gates, the second value is the text [paused until, time at which a rate opens the next gate]. The time is not read by
-- a statement of its own, because each statement takes longer than the read of the index. SQLite reads the time only for
-- such queues. "||" makes it a text in all versions of SQLite. If the queue has no such jobs and is not paused, the second
-- value is null.
-- All outlooks are packed into one row, because each fetched row releases the interpreter's lock. Without INDEXED BY, the
-- planner would read the whole queue, because the planner does not know that state = 1 implies state <> 0. INDEXED BY also
-- keeps an ANALYZE from changing the plan.
SELECT json_group_array(json_array(
    queue,
    (SELECT iif(has_gates, '' || json_array(paused_until, (
         SELECT min(opens_at) FROM multiq_rates INDEXED BY multiq_rates_opening
         WHERE multiq_rates.queue = asked.queue AND opens_at IS NOT NULL
     )), paused_until)
     FROM multiq_queues WHERE multiq_queues.queue = asked.queue),
    EXISTS (SELECT 1 FROM multiq_jobs AS job INDEXED BY multiq_jobs_ready
            WHERE job.queue = asked.queue AND state = 0),
    (SELECT min(due_at) FROM multiq_jobs AS job INDEXED BY multiq_jobs_waiting
     WHERE job.queue = asked.queue AND state <> 0 AND state = 1),
    (SELECT min(due_at) FROM multiq_jobs AS job INDEXED BY multiq_jobs_waiting
     WHERE job.queue = asked.queue AND state <> 0 AND state = 2)
))
FROM (SELECT value AS queue FROM json_each(:queues)) AS asked
