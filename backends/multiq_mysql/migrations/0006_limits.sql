-- Limits: the gates of jobs, the gates at which jobs wait, and the leases that the limits count.
-- oldest: 1
--
-- gates: the gates of a job, as the character # and JSON in hex. NULL: the job has no gates. reserve.sql explains the
-- character. gates is the last column, so that the servers can add it without a rebuild of the table. A program of version 1
-- to 5 does not change this column. It hands out ready jobs with gates as if they had no gates, but it does not hand out
-- parked jobs.
-- state: 6 parked. The job waits in a line. Only a reserve treats it differently from a ready job. All other calls treat it
-- as ready.
ALTER TABLE multiq_jobs ADD COLUMN gates TEXT CHARACTER SET ascii COLLATE ascii_bin NULL;

-- quota: a Quota as JSON.
CREATE TABLE IF NOT EXISTS multiq_limits (
    queue VARBINARY(128) NOT NULL,
    name VARBINARY(800) NOT NULL,
    pinned TINYINT UNSIGNED NOT NULL,
    quota VARBINARY(1000) NOT NULL,
    PRIMARY KEY (queue, name)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

-- A gate. A reserve locks the rows of all gates that it looks at. All times are microseconds since 1970 of the server's
-- clock. due: the time at which the next job would be due at the steady rate. 0: the next job is due now. look_at: from this
-- time on, the next reserve must check whether the gate is open. A line of a fair limit whose gate is open has its turn
-- there, so that reserves first check the lines whose turns are next. NULL: no job waits for this gate, or the gate has a line
-- that waits for another gate, which closed_name and closed_key name. turn: used only for fair limits. The line with the
-- lowest number has the next turn. A row without a name means that a change of the limit gate_key is not done yet. closed_key
-- is then the last key that is done.
CREATE TABLE IF NOT EXISTS multiq_gates (
    queue VARBINARY(128) NOT NULL,
    name VARBINARY(800) NOT NULL,
    gate_key VARBINARY(800) NOT NULL,
    due BIGINT NOT NULL,
    look_at BIGINT NULL,
    turn BIGINT NOT NULL,
    closed_name VARBINARY(800) NULL,
    closed_key VARBINARY(800) NULL,
    PRIMARY KEY (queue, name, gate_key),
    KEY multiq_gates_look (queue, look_at, due),
    KEY multiq_gates_turn (queue, name, turn),
    KEY multiq_gates_closed (queue, closed_name, closed_key, turn)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

-- The lines of parked jobs. job is the seq of a job. A row whose job is not parked has no meaning.
CREATE TABLE IF NOT EXISTS multiq_lines (
    queue VARBINARY(128) NOT NULL,
    name VARBINARY(800) NOT NULL,
    gate_key VARBINARY(800) NOT NULL,
    priority INT UNSIGNED NOT NULL,
    job BIGINT UNSIGNED NOT NULL,
    PRIMARY KEY (queue, name, gate_key, priority, job),
    KEY multiq_lines_job (job)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

-- The leases of jobs with gates. A row means a used slot while its job is reserved under the row's token and the lease is
-- live. So a slot cannot leak. All other rows have no meaning.
CREATE TABLE IF NOT EXISTS multiq_leases (
    job BIGINT UNSIGNED NOT NULL,
    name VARBINARY(800) NOT NULL,
    gate_key VARBINARY(800) NOT NULL,
    queue VARBINARY(128) NOT NULL,
    token BIGINT UNSIGNED NOT NULL,
    PRIMARY KEY (job, name, gate_key),
    KEY multiq_leases_gate (queue, name, gate_key, job)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;
