-- Buries a job like bury.sql. Values that can be read are kept, and all others are replaced by defaults. The job comes
-- behind all buried jobs whose due_at can be read.
UPDATE multiq_jobs
SET state = 3, token = NULL, queue = coalesce(:queue, queue), id = coalesce(:id, id), reason = :reason,
    priority = :priority, ttr = :ttr, enqueued_at = :enqueued_at,
    attempt = :attempt, crashes = :crashes, kicks = :kicks,
    due_at = 1 + coalesce((
        SELECT max(due_at) FROM multiq_jobs AS buried
        WHERE buried.queue = coalesce(:queue, multiq_jobs.queue) AND buried.state = 3 AND typeof(due_at) = 'integer'
            AND due_at < 9223372036854775807
    ), 0)
WHERE seq = :seq
