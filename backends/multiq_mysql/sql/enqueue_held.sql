-- Like enqueue.sql, for a batch with at least one held job.
INSERT INTO multiq_jobs (queue, id, state, place, priority, ttr, enqueued_at, `body`, awaits, hold_delay)
VALUES ({row})
ON DUPLICATE KEY UPDATE seq = seq
