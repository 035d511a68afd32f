-- One statement for a whole batch, which commits by itself: nothing else makes one round trip of an enqueue. A job
-- whose id is there already stays as it is, so that an enqueue can be repeated. IGNORE would do that, too, and would
-- also store what does not fit, cut short.
INSERT INTO multiq_jobs (queue, id, state, place, priority, ttr, enqueued_at, `body`)
VALUES ({row})
ON DUPLICATE KEY UPDATE seq = seq
