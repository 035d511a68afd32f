-- The tables of a new file. upgrade_<n>.sql upgrades older tables, and a test compares the two results.
--
-- state: 0 ready, 1 delayed, 2 reserved, 3 buried, 4 held, 5 parked. All times are nanoseconds since the epoch.
-- due_at: the due time of a delayed job, the end of a reserved job's lease, a buried job's position in the order of the
-- buried jobs, or 0.
-- seq: a job's age. A later job may get the seq of a deleted job, so leases are fenced by their tokens.
--
-- A body over 2 kB is stored in multiq_bodies, because SQLite rewrites the whole row whenever the job moves. The column body
-- is then NULL. When the job is deleted, a trigger deletes its body in multiq_bodies.
--
-- A job's memo and detail are stored in multiq_memos. If a job has a memo or a detail, its body is stored in multiq_bodies,
-- whatever the body's size. So NULL in the column body means that the job may have rows in multiq_bodies and multiq_memos. A
-- job without a memo and a detail takes no more bytes than before version 3, and its ack takes no more steps. Only a
-- reschedule changes a job's seq. A trigger then deletes the job's memo and detail.
--
-- The body of a held job is stored in multiq_bodies, too. multiq_terms has what the job waits for: awaits is the number of
-- members that have not arrived yet, and delay is the delay in nanoseconds that begins when the last member arrives.
-- multiq_arrivals has the members that have arrived. The rows of both tables are deleted when the job is no longer held.
-- There is one exception: if a held job was buried because it could not be read, its rows stay until the job is deleted or
-- rescheduled. multiq_memos.doomed is the reason why a job must not run. Members and this reason may be any text, and are
-- encoded as UTF-8.
--
-- The body of a job with a unique key is stored in multiq_bodies, too. multiq_memos has the key, and in unique_until the
-- event that ends the job's claim to the key: 0 gone, 1 buried, 2 reserved. multiq_unique has an entry for each key, which
-- names the job that took the key last. The next enqueue with this key decides whether that job still has the key.
-- held_until: the time until which the key is held. When a job is deleted, its entry is deleted, too, unless the key is held
-- by time.
--
-- A job with gates has its body in multiq_bodies, and a row for each gate in multiq_gates. multiq_queues.has_gates says that
-- a queue may have such jobs. A ready job with gates waits in the line of one of its gates: the row of this gate has the
-- job's priority. If the job is the first of its line and the gate may be open, the job's state is 0, and its due_at is 1.
-- In ready jobs without gates, due_at is 0. All other jobs of the line are parked (state 5). So a reserve does not read the jobs
-- that wait behind a closed gate. A reserved job's rows in multiq_gates have the token of the job's lease. A slot is in use
-- if such a row has the token of a job with a live lease. So a slot cannot leak. An insert into multiq_opened means that a
-- gate may have opened: a trigger makes the first job of the gate's line ready. Triggers make such an insert whenever a row
-- of multiq_gates loses its token or its place.
--
-- multiq_rates: due is the time at which a gate's next job would be due at the steady rate. opens_at: jobs wait for this
-- time. A row without a name stores which part of a change of a limit is not done yet: see limits.py.
-- multiq_turns: the lines of fair limits. The line with the lowest turn is the next one. closed_name and closed_key: the
-- gate for which the line's first job waits. priority: the priority of this job.
--
-- multiq_notes: version is a random number, so that a new note does not get the version of a dropped note.
--
-- multiq_outcomes: the outcomes of deleted jobs. kind: 0 done, 1 cancelled. A later outcome has a higher seq.
--
-- Each job is in exactly one of the two partial indexes, so a move of a job deletes one entry and inserts one. STRICT tables
-- refuse a text in a column for numbers. If SQLite is older than 3.37, the tables are not STRICT. Upgraded tables are not
-- STRICT either.
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

CREATE TABLE multiq_memos (
    seq INTEGER PRIMARY KEY,
    memo BLOB,
    detail BLOB,
    doomed BLOB,
    unique_key BLOB,
    unique_until INTEGER
) STRICT;

CREATE TABLE multiq_unique (
    key BLOB NOT NULL,
    queue TEXT NOT NULL,
    id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    held_until INTEGER NOT NULL,
    PRIMARY KEY (key, queue)
) WITHOUT ROWID, STRICT;

CREATE INDEX multiq_unique_expiry ON multiq_unique (queue, held_until) WHERE held_until > 0;

CREATE TRIGGER multiq_unique_ends_with_its_job AFTER DELETE ON multiq_memos WHEN old.unique_key IS NOT NULL
BEGIN
    DELETE FROM multiq_unique WHERE key = old.unique_key AND seq = old.seq AND held_until = 0;
END;

CREATE TABLE multiq_terms (seq INTEGER PRIMARY KEY, awaits INTEGER NOT NULL, delay INTEGER NOT NULL) STRICT;

CREATE TABLE multiq_arrivals (seq INTEGER, member BLOB, PRIMARY KEY (seq, member)) WITHOUT ROWID, STRICT;

CREATE TRIGGER multiq_arrivals_follow_their_job AFTER DELETE ON multiq_terms
BEGIN
    DELETE FROM multiq_arrivals WHERE seq = old.seq;
END;

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
) STRICT;

CREATE UNIQUE INDEX multiq_outcomes_id ON multiq_outcomes (queue, id);
CREATE INDEX multiq_outcomes_expiry ON multiq_outcomes (queue, kind, expires_at);

CREATE TABLE multiq_notes (
    seq INTEGER PRIMARY KEY,
    home TEXT NOT NULL,
    key TEXT NOT NULL,
    version INTEGER NOT NULL,
    value BLOB NOT NULL,
    expires_at INTEGER
) STRICT;

CREATE UNIQUE INDEX multiq_notes_key ON multiq_notes (home, key);
CREATE INDEX multiq_notes_expiry ON multiq_notes (home, expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE multiq_queues (
    queue TEXT PRIMARY KEY,
    paused_until INTEGER NOT NULL,
    has_gates INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID, STRICT;

CREATE TABLE multiq_limits (
    queue TEXT NOT NULL,
    name TEXT NOT NULL,
    slots INTEGER,
    rate REAL,
    per REAL NOT NULL,
    burst INTEGER NOT NULL,
    fair INTEGER NOT NULL,
    pinned INTEGER NOT NULL,
    PRIMARY KEY (queue, name)
) WITHOUT ROWID, STRICT;

CREATE TABLE multiq_gates (
    seq INTEGER NOT NULL,
    queue TEXT NOT NULL,
    name TEXT NOT NULL,
    key BLOB NOT NULL,
    priority INTEGER,
    token INTEGER,
    PRIMARY KEY (seq, name, key)
) WITHOUT ROWID, STRICT;

CREATE INDEX multiq_gates_lines ON multiq_gates (queue, name, key, priority, seq) WHERE priority IS NOT NULL;
CREATE INDEX multiq_gates_leases ON multiq_gates (queue, name, key) WHERE token IS NOT NULL;

CREATE TABLE multiq_rates (
    queue TEXT NOT NULL,
    name TEXT NOT NULL,
    key BLOB NOT NULL,
    due INTEGER NOT NULL,
    opens_at INTEGER,
    PRIMARY KEY (queue, name, key)
) WITHOUT ROWID, STRICT;

CREATE INDEX multiq_rates_opening ON multiq_rates (queue, opens_at) WHERE opens_at IS NOT NULL;
CREATE INDEX multiq_rates_past ON multiq_rates (queue, due) WHERE opens_at IS NULL;

CREATE TABLE multiq_turns (
    seq INTEGER PRIMARY KEY,
    queue TEXT NOT NULL,
    name TEXT NOT NULL,
    key BLOB NOT NULL,
    priority INTEGER NOT NULL,
    turn INTEGER NOT NULL,
    closed_name TEXT,
    closed_key BLOB
) STRICT;

CREATE UNIQUE INDEX multiq_turns_line ON multiq_turns (queue, name, key);
CREATE INDEX multiq_turns_last ON multiq_turns (queue, name, turn);
CREATE INDEX multiq_turns_open ON multiq_turns (queue, name, priority, turn) WHERE closed_name IS NULL;
CREATE INDEX multiq_turns_closed ON multiq_turns (queue, closed_name, closed_key, priority, turn)
WHERE closed_name IS NOT NULL;

CREATE VIEW multiq_opened (queue, name, key) AS SELECT NULL, NULL, NULL;
CREATE TRIGGER multiq_opens INSTEAD OF INSERT ON multiq_opened
BEGIN
    UPDATE multiq_jobs SET state = 0, due_at = 1
    WHERE state = 5 AND seq = (
        SELECT line.seq FROM multiq_gates AS line CROSS JOIN multiq_jobs AS job ON job.seq = line.seq
        WHERE line.queue = new.queue AND line.name = new.name AND line.key = new.key AND line.priority IS NOT NULL
            AND job.state IN (0, 5)
        ORDER BY line.priority, line.seq
        LIMIT 1
    );
    DELETE FROM multiq_turns
    WHERE queue = new.queue AND name = new.name AND key = new.key AND NOT EXISTS (
        SELECT 1 FROM multiq_gates AS line CROSS JOIN multiq_jobs AS job ON job.seq = line.seq
        WHERE line.queue = new.queue AND line.name = new.name AND line.key = new.key AND line.priority IS NOT NULL
            AND job.state IN (0, 5)
    );
    UPDATE multiq_turns SET closed_name = NULL, closed_key = NULL, priority = (
        SELECT line.priority FROM multiq_gates AS line
        WHERE line.queue = new.queue AND line.name = new.name AND line.key = new.key AND line.priority IS NOT NULL
        ORDER BY line.priority, line.seq
        LIMIT 1
    )
    WHERE queue = new.queue AND name = new.name AND key = new.key;
    UPDATE multiq_turns SET closed_name = NULL, closed_key = NULL
    WHERE seq = (
        SELECT waiting.seq FROM multiq_turns AS waiting
        WHERE waiting.queue = new.queue AND waiting.closed_name = new.name AND waiting.closed_key = new.key
        ORDER BY waiting.priority, waiting.turn
        LIMIT 1
    );
END;

CREATE TRIGGER multiq_turn_comes AFTER UPDATE OF closed_name ON multiq_turns
WHEN old.closed_name IS NOT NULL AND new.closed_name IS NULL
BEGIN
    UPDATE multiq_jobs SET state = 0, due_at = 1
    WHERE state = 5 AND seq = (
        SELECT line.seq FROM multiq_gates AS line CROSS JOIN multiq_jobs AS job ON job.seq = line.seq
        WHERE line.queue = new.queue AND line.name = new.name AND line.key = new.key AND line.priority IS NOT NULL
            AND job.state IN (0, 5)
        ORDER BY line.priority, line.seq
        LIMIT 1
    );
END;

-- A ready job may be the one that an open gate has made ready. If the job is deleted or rescheduled instead of reserved,
-- each of its gates makes the next job ready.
CREATE TRIGGER multiq_gate_is_left AFTER UPDATE ON multiq_gates
WHEN new.token IS NULL AND (
    old.token IS NOT NULL OR old.priority IS NOT NULL AND new.priority IS NULL OR old.seq <> new.seq
)
BEGIN
    INSERT INTO multiq_opened VALUES (old.queue, old.name, old.key);
END;

CREATE TRIGGER multiq_gate_is_deleted AFTER DELETE ON multiq_gates
BEGIN
    INSERT INTO multiq_opened VALUES (old.queue, old.name, old.key);
END;

CREATE TRIGGER multiq_line_begins AFTER INSERT ON multiq_gates WHEN new.priority IS NOT NULL
BEGIN
    INSERT OR IGNORE INTO multiq_turns (queue, name, key, priority, turn)
    SELECT new.queue, new.name, new.key, new.priority, 1 + coalesce((
        SELECT max(turn) FROM multiq_turns WHERE queue = new.queue AND name = new.name
    ), 0)
    FROM multiq_limits WHERE queue = new.queue AND name = new.name AND fair;
    INSERT INTO multiq_opened SELECT new.queue, new.name, new.key
    WHERE new.seq = (
        SELECT line.seq FROM multiq_gates AS line CROSS JOIN multiq_jobs AS job ON job.seq = line.seq
        WHERE line.queue = new.queue AND line.name = new.name AND line.key = new.key AND line.priority IS NOT NULL
            AND job.state IN (0, 5)
        ORDER BY line.priority, line.seq
        LIMIT 1
    );
END;

CREATE TRIGGER multiq_line_is_joined AFTER UPDATE OF priority ON multiq_gates
WHEN old.priority IS NULL AND new.priority IS NOT NULL
BEGIN
    INSERT OR IGNORE INTO multiq_turns (queue, name, key, priority, turn)
    SELECT new.queue, new.name, new.key, new.priority, 1 + coalesce((
        SELECT max(turn) FROM multiq_turns WHERE queue = new.queue AND name = new.name
    ), 0)
    FROM multiq_limits WHERE queue = new.queue AND name = new.name AND fair;
    INSERT INTO multiq_opened SELECT new.queue, new.name, new.key
    WHERE new.seq = (
        SELECT line.seq FROM multiq_gates AS line CROSS JOIN multiq_jobs AS job ON job.seq = line.seq
        WHERE line.queue = new.queue AND line.name = new.name AND line.key = new.key AND line.priority IS NOT NULL
            AND job.state IN (0, 5)
        ORDER BY line.priority, line.seq
        LIMIT 1
    );
END;

INSERT INTO multiq_schema (version) VALUES (4);
