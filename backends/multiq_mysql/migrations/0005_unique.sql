-- The unique keys of jobs.
-- oldest: 1
--
-- unique_key: one byte for the job's until (0 gone, 1 buried, 2 reserved), then the key that the job was enqueued with.
-- NULL: the job has no key. unique_key is the last column, so that the servers can add it without a rebuild of the table.
-- The reschedule of a program of version 1 to 4 deletes the key. Apart from this, such a program does not change the column.
-- Its kick does not check whether another job has taken the key meanwhile.
ALTER TABLE multiq_jobs ADD COLUMN unique_key VARBINARY(65) NULL;

-- For each key, the job that took it last. The job's row in multiq_jobs shows whether the job still has the key. If the job
-- is gone, the key is free, unless it is held by time. held_until: the key is held by time until then, in microseconds since
-- 1970 of the server's clock. 0: the key is not held by time.
CREATE TABLE IF NOT EXISTS multiq_unique (
    queue VARBINARY(128) NOT NULL,
    unique_key VARBINARY(64) NOT NULL,
    id VARBINARY(255) NOT NULL,
    held_until BIGINT NOT NULL,
    PRIMARY KEY (queue, unique_key)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;
