-- Outcomes of deleted jobs, and memos and details of jobs. Verdicts store them.
-- oldest: 1
--
-- memo, detail: NULL if none is stored. They are the last columns, so that the servers can add them without a rebuild of the
-- table. A program of version 1 or 2 does not change these columns, also in calls in which a newer program would delete the
-- detail.
--
-- Outcomes have a table of their own, so that a claim does not have to skip outcomes in the table of the jobs.
-- kind: 0 done, 1 cancelled. kept_at, expires_at: microseconds since 1970 of the server's clock.
-- multiq_outcomes_expiry: the order of the history. Its last column is kind, so that a history of one kind reads only rows
-- of this kind.
ALTER TABLE multiq_jobs ADD COLUMN memo LONGBLOB NULL, ADD COLUMN detail LONGBLOB NULL;

CREATE TABLE IF NOT EXISTS multiq_outcomes (
    queue VARBINARY(128) NOT NULL,
    id VARBINARY(255) NOT NULL,
    kind TINYINT UNSIGNED NOT NULL,
    kept_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,
    attempt INT UNSIGNED NOT NULL,
    body LONGBLOB NOT NULL,
    PRIMARY KEY (queue, id),
    KEY multiq_outcomes_expiry (queue, expires_at, id, kind)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;
