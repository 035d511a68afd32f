-- The tables of a new file. upgrade_<n>.sql upgrades older tables, and a test compares the two results.
--
-- state: 0 ready, 1 delayed, 2 reserved, 3 buried. All times are nanoseconds since the epoch.
-- due_at: the due time of a delayed job, the end of a reserved job's lease, or a buried job's position among the buried.
-- seq: a job's age. A later job may get the seq of a deleted job, so leases are fenced by their tokens.
--
-- A body over 2 kB is stored in multiq_bodies, because SQLite rewrites the whole row whenever the job moves. The column
-- body is then NULL, and a trigger deletes such a body together with its job.
--
-- Each job is in exactly one of the two partial indexes, so a move deletes one entry and inserts one.
-- STRICT tables refuse a text for a number. An SQLite before 3.37 makes tables that are not STRICT. Upgraded tables are
-- not STRICT either.
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
