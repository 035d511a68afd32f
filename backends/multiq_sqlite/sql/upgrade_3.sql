-- Version 2 kept no memos, details, outcomes and notes, and held no jobs.
CREATE TABLE multiq_memos (seq INTEGER PRIMARY KEY, memo BLOB, detail BLOB, doomed BLOB);

CREATE TABLE multiq_terms (seq INTEGER PRIMARY KEY, awaits INTEGER NOT NULL, delay INTEGER NOT NULL);

CREATE TABLE multiq_arrivals (seq INTEGER, member BLOB, PRIMARY KEY (seq, member)) WITHOUT ROWID;

CREATE TRIGGER multiq_arrivals_follow_their_job AFTER DELETE ON multiq_terms
BEGIN
    DELETE FROM multiq_arrivals WHERE seq = old.seq;
END;

DROP TRIGGER multiq_bodies_follow_their_job;
CREATE TRIGGER multiq_bodies_follow_their_job AFTER DELETE ON multiq_jobs WHEN old.body IS NULL
BEGIN
    DELETE FROM multiq_bodies WHERE seq = old.seq;
    DELETE FROM multiq_memos WHERE seq = old.seq;
    DELETE FROM multiq_terms WHERE seq = old.seq;
END;

CREATE TRIGGER multiq_memos_end_with_a_reschedule AFTER UPDATE OF seq ON multiq_jobs WHEN old.body IS NULL
BEGIN
    DELETE FROM multiq_memos WHERE seq = old.seq;
    DELETE FROM multiq_terms WHERE seq = old.seq;
END;

CREATE TABLE multiq_outcomes (
    seq INTEGER PRIMARY KEY,
    queue TEXT NOT NULL,
    id TEXT NOT NULL,
    kind INTEGER NOT NULL,
    kept_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    body BLOB NOT NULL
);

CREATE UNIQUE INDEX multiq_outcomes_id ON multiq_outcomes (queue, id);
CREATE INDEX multiq_outcomes_expiry ON multiq_outcomes (queue, kind, expires_at);

CREATE TABLE multiq_notes (
    seq INTEGER PRIMARY KEY,
    home TEXT NOT NULL,
    key TEXT NOT NULL,
    version INTEGER NOT NULL,
    value BLOB NOT NULL,
    expires_at INTEGER
);

CREATE UNIQUE INDEX multiq_notes_key ON multiq_notes (home, key);
CREATE INDEX multiq_notes_expiry ON multiq_notes (home, expires_at) WHERE expires_at IS NOT NULL;

UPDATE multiq_schema SET version = 3;
