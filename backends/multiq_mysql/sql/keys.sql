-- Reads the entries of unique keys, and the jobs that these entries name. Locks no rows.
SELECT entry.unique_key, entry.id, held_until > {now}, state, state IN (1, 2) AND place <= {now}, attempt,
    {now} - GREATEST(enqueued_at, 0), job.unique_key
FROM multiq_unique AS entry FORCE INDEX (PRIMARY)
LEFT JOIN multiq_jobs AS job FORCE INDEX (multiq_jobs_id) ON job.queue = entry.queue AND job.id = entry.id
WHERE entry.queue = {queue} AND entry.unique_key IN ({keys})
