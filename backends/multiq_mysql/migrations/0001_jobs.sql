-- The jobs and the pauses.
--
-- state: 0 ready, 1 delayed, 2 reserved, 3 buried, 4 ready again (see docs/decisions/0013). All times are microseconds
-- since 1970 of the server's clock.
-- place: the sort key within a state. It is the priority of a ready job, the due time of a delayed job, the end of a
-- reserved job's lease, or a buried job's position in the order in which buried jobs are kicked. So one index serves all
-- states. When a job changes its state, one entry of the index is deleted and one is inserted.
-- seq: a job's age. A rescheduled job gets a new seq. token: the fence of the last reservation. If a verdict ends the lease,
-- the token stays. So after a lost reply, the token shows whether the verdict was carried out. If the lease ends by time,
-- the token becomes 0.
--
-- Names and ids are binary, so that no collation treats two different names or ids as equal. Columns that a reservation
-- changes have a fixed size, so that InnoDB updates the row in place.
CREATE TABLE IF NOT EXISTS multiq_jobs (
    seq BIGINT UNSIGNED NOT NULL AUTO_INCREMENT,
    queue VARBINARY(128) NOT NULL,
    id VARBINARY(255) NOT NULL,
    state TINYINT UNSIGNED NOT NULL,
    place BIGINT NOT NULL,
    priority INT UNSIGNED NOT NULL,
    ttr BIGINT NOT NULL,
    enqueued_at BIGINT NOT NULL,
    token BIGINT UNSIGNED NOT NULL DEFAULT 0,
    attempt INT UNSIGNED NOT NULL DEFAULT 0,
    crashes INT UNSIGNED NOT NULL DEFAULT 0,
    kicks INT UNSIGNED NOT NULL DEFAULT 0,
    reason LONGBLOB NULL,
    body LONGBLOB NOT NULL,
    PRIMARY KEY (seq),
    UNIQUE KEY multiq_jobs_id (queue, id),
    KEY multiq_jobs_place (queue, state, place, seq)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

CREATE TABLE IF NOT EXISTS multiq_queues (
    queue VARBINARY(128) NOT NULL,
    paused_until BIGINT NOT NULL,
    PRIMARY KEY (queue)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;
