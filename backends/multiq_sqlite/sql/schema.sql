-- The tables as a new file gets them. upgrade_<n>.sql bring older ones here; a test holds both to the same result.
--
-- state: 0 ready, 1 delayed, 2 reserved, 3 buried. All times are nanoseconds since the epoch.
-- due_at: when a delayed job is due, when a reserved job's lease ends, a buried job's place among the buried.
-- seq is a job's age. It may be given again once the job that had it is gone: what fences a lease is the token.
--
-- A body over 2 kB lives in multiq_bodies, because SQLite rewrites a row, body and all, whenever the job moves.
-- There body is NULL here, which a trigger uses to remove it together with its job.
--
-- Each job is in exactly one of the two partial indexes, so that a move costs one entry out and one in.
-- STRICT tables take no text for a number; an SQLite before 3.37 knows no such tables, and makes others. Upgraded ones are not.
CREATE TABLE multiq_schema (version INTEGER NOT NULL) STRICT;

CREATE TABLE multiq_jobs (
    seq INTEGER PRIMARY KEY,
    queue TEXT NOT NULL,
    id TEXT NOT NULL,
    state INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    due_at INTEGER NOT NULL,
    ttr INTEGER NOT NULL,
    enqueued_at INTEGER NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,
    crashes INTEGER NOT NULL DEFAULT 0,
    kicks INTEGER NOT NULL DEFAULT 0,
    token INTEGER,
    reason TEXT,
    body BLOB
) STRICT;

CREATE UNIQUE INDEX multiq_jobs_id ON multiq_jobs (queue, id);
CREATE INDEX multiq_jobs_ready ON multiq_jobs (queue, priority) WHERE state = 0;
CREATE INDEX multiq_jobs_waiting ON multiq_jobs (queue, state, due_at) WHERE state <> 0;

CREATE TABLE multiq_bodies (seq INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT;

CREATE TRIGGER multiq_bodies_follow_their_job AFTER DELETE ON multiq_jobs WHEN old.body IS NULL
BEGIN
    DELETE FROM multiq_bodies WHERE seq = old.seq;
END;

CREATE TABLE multiq_queues (queue TEXT PRIMARY KEY, paused_until INTEGER NOT NULL) WITHOUT ROWID, STRICT;

INSERT INTO multiq_schema (version) VALUES (2);
