-- One statement for a whole batch, which commits by itself: this is the only way to one round trip per enqueue. A job
-- whose id exists already stays as it is, so that an enqueue can be repeated. IGNORE would do that, too, but would also
-- store values that do not fit, truncated.
INSERT INTO multiq_jobs (queue, id, state, place, priority, ttr, enqueued_at, `body`)
VALUES ({row})
ON DUPLICATE KEY UPDATE seq = seq
