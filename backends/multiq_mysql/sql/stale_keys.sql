-- Finds some entries whose jobs are gone. Looks at a few entries after the given key, and at the first entries of the queue.
-- Keys are hashes, so the entries after a key are a random sample.
SELECT entry.unique_key, entry.id FROM (
    (SELECT queue, unique_key, id, held_until FROM multiq_unique FORCE INDEX (PRIMARY)
     WHERE queue = {queue} AND unique_key > {key} ORDER BY unique_key LIMIT {examined})
    UNION ALL
    (SELECT queue, unique_key, id, held_until FROM multiq_unique FORCE INDEX (PRIMARY)
     WHERE queue = {queue} AND unique_key < {key} ORDER BY unique_key LIMIT {examined})
) AS entry LEFT JOIN multiq_jobs AS job FORCE INDEX (multiq_jobs_id) ON job.queue = entry.queue AND job.id = entry.id
WHERE held_until <= {now} AND job.seq IS NULL
LIMIT {limit}
