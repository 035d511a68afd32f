-- The id of the job that took a key last. Also the job itself, if it still exists and was enqueued with this key.
SELECT taken.id, taken.held_until, job.seq, job.state, job.due_at, job.attempt, job.enqueued_at, own.unique_until
FROM multiq_unique AS taken
    LEFT JOIN multiq_memos AS own ON own.seq = taken.seq AND own.unique_key = taken.key
    LEFT JOIN multiq_jobs AS job ON job.seq = own.seq AND job.queue = taken.queue
WHERE taken.key = :key AND taken.queue = :queue
