-- Deletes entries that stale_keys.sql has found, except those that another session is changing. drop_expired.sql explains
-- the form. The conditions are checked again, because a job may have taken the key meanwhile. NOT EXISTS is not used,
-- because MariaDB might then read all jobs first, which is slow.
DELETE entry FROM (
    SELECT queue, unique_key FROM multiq_unique AS found FORCE INDEX (PRIMARY)
    WHERE queue = {queue} AND unique_key IN ({keys}) AND held_until <= {now}
        AND (SELECT COUNT(*) FROM multiq_jobs AS job FORCE INDEX (multiq_jobs_id)
             WHERE job.queue = found.queue AND job.id = found.id) = 0
    LIMIT {limit}
    FOR UPDATE SKIP LOCKED
) AS stale STRAIGHT_JOIN multiq_unique AS entry FORCE INDEX (PRIMARY)
ON entry.queue = stale.queue AND entry.unique_key = stale.unique_key
