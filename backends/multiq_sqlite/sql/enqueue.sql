-- One row. For several rows the group after VALUES is repeated, because each statement, and each row of an executemany,
-- gives up the interpreter's lock. Beside a busy thread, getting the lock back takes milliseconds.
-- A job that exists already stays unchanged, so a repeated enqueue adds nothing.
INSERT INTO multiq_jobs (queue, enqueued_at, id, state, due_at, priority, ttr, body)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING
