"""The tables of earlier versions of multiq, as they made them in a new file."""

from __future__ import annotations

VERSION_1 = """
CREATE TABLE multiq_schema (version INTEGER NOT NULL);
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
    token INTEGER,
    reason TEXT,
    body BLOB
);
CREATE UNIQUE INDEX multiq_jobs_id ON multiq_jobs (queue, id);
CREATE INDEX multiq_jobs_ready ON multiq_jobs (queue, priority) WHERE state = 0;
CREATE INDEX multiq_jobs_waiting ON multiq_jobs (queue, state, due_at) WHERE state <> 0;
CREATE TABLE multiq_queues (queue TEXT PRIMARY KEY, paused_until INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO multiq_schema (version) VALUES (1);
"""

#: from SQLite 3.37 on, these tables were STRICT
VERSION_2 = """
CREATE TABLE multiq_schema (version INTEGER NOT NULL);

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
);

CREATE UNIQUE INDEX multiq_jobs_id ON multiq_jobs (queue, id);
CREATE INDEX multiq_jobs_ready ON multiq_jobs (queue, priority) WHERE state = 0;
CREATE INDEX multiq_jobs_waiting ON multiq_jobs (queue, state, due_at) WHERE state <> 0;

CREATE TABLE multiq_bodies (seq INTEGER PRIMARY KEY, body BLOB NOT NULL);

CREATE TRIGGER multiq_bodies_follow_their_job AFTER DELETE ON multiq_jobs WHEN old.body IS NULL
BEGIN
    DELETE FROM multiq_bodies WHERE seq = old.seq;
END;

CREATE TABLE multiq_queues (queue TEXT PRIMARY KEY, paused_until INTEGER NOT NULL) WITHOUT ROWID;

INSERT INTO multiq_schema (version) VALUES (2);
"""
