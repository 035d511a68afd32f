-- Version 3 had neither unique jobs nor limits.
ALTER TABLE multiq_memos ADD COLUMN unique_key BLOB;
ALTER TABLE multiq_memos ADD COLUMN unique_until INTEGER;

CREATE TABLE multiq_unique (
    key BLOB NOT NULL,
    queue TEXT NOT NULL,
    id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    held_until INTEGER NOT NULL,
    PRIMARY KEY (key, queue)
) WITHOUT ROWID;

CREATE INDEX multiq_unique_expiry ON multiq_unique (queue, held_until) WHERE held_until > 0;

CREATE TRIGGER multiq_unique_ends_with_its_job AFTER DELETE ON multiq_memos WHEN old.unique_key IS NOT NULL
BEGIN
    DELETE FROM multiq_unique WHERE key = old.unique_key AND seq = old.seq AND held_until = 0;
END;

ALTER TABLE multiq_queues ADD COLUMN has_gates INTEGER NOT NULL DEFAULT 0;

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
) WITHOUT ROWID;

CREATE TABLE multiq_gates (
    seq INTEGER NOT NULL,
    queue TEXT NOT NULL,
    name TEXT NOT NULL,
    key BLOB NOT NULL,
    priority INTEGER,
    token INTEGER,
    PRIMARY KEY (seq, name, key)
) WITHOUT ROWID;

CREATE INDEX multiq_gates_lines ON multiq_gates (queue, name, key, priority, seq) WHERE priority IS NOT NULL;
CREATE INDEX multiq_gates_leases ON multiq_gates (queue, name, key) WHERE token IS NOT NULL;

CREATE TABLE multiq_rates (
    queue TEXT NOT NULL,
    name TEXT NOT NULL,
    key BLOB NOT NULL,
    due INTEGER NOT NULL,
    opens_at INTEGER,
    PRIMARY KEY (queue, name, key)
) WITHOUT ROWID;

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
);

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

UPDATE multiq_schema SET version = 4;
