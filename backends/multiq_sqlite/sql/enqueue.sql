-- This is the statement for one row. For several rows, the driver repeats the group after VALUES. Each statement, and each
-- row of an executemany, releases the interpreter's lock. If another thread is busy, this thread gets the lock back only
-- after milliseconds. A job that exists already stays unchanged, so a repeated enqueue adds nothing.
INSERT INTO multiq_jobs (queue, enqueued_at, id, state, due_at, priority, ttr, body)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING
