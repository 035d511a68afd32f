-- Like enqueue_held.sql, for a batch with at least one job that has a unique key or gates.
INSERT INTO multiq_jobs (queue, id, state, place, priority, ttr, enqueued_at, `body`, awaits, hold_delay, unique_key, gates)
VALUES ({row})
ON DUPLICATE KEY UPDATE seq = seq
