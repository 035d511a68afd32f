-- One row; for many the group after VALUES is repeated, because each statement, and each row of an executemany, gives
-- up the interpreter's lock, and getting it back beside a busy thread takes milliseconds.
-- A job that is there already stays as it is: repeating an enqueue adds nothing.
INSERT INTO multiq_jobs (queue, enqueued_at, id, state, due_at, priority, ttr, body)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING
