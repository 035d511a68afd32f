-- One statement for a whole batch. It commits by itself, so an enqueue takes one round trip. If a job with the same id
-- exists already, it stays unchanged, so that an enqueue can be repeated. IGNORE would also leave the job unchanged, but it
-- would truncate values that do not fit.
INSERT INTO multiq_jobs (queue, id, state, place, priority, ttr, enqueued_at, `body`)
VALUES ({row})
ON DUPLICATE KEY UPDATE seq = seq
