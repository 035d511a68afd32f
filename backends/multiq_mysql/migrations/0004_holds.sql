-- Jobs that wait for arrivals, and notes.
-- oldest: 1
--
-- state: 5 held. A program of version 1 to 3 knows only the states 0 to 4, so it does not hand out held jobs. Its stats and
-- listings leave held jobs out. Its peek and kick_job raise an error for a held job.
-- awaits: the number of arrivals that a held job still waits for. hold_delay: microseconds of delay that begin when the job
-- is released. The two columns have no meaning in other states. doomed: the reason why a released job must not run. It is
-- stored as an exclamation mark followed by UTF-8 in hex. reserve.sql explains the mark.
ALTER TABLE multiq_jobs ADD COLUMN awaits BIGINT NULL, ADD COLUMN hold_delay BIGINT NULL, 
    ADD COLUMN doomed TEXT CHARACTER SET ascii COLLATE ascii_bin NULL;

-- The members that have arrived at held jobs. job is the seq of a job, so a later job of the same id has no members. Rows of
-- jobs that are no longer held have no meaning.
CREATE TABLE IF NOT EXISTS multiq_arrivals (
    job BIGINT UNSIGNED NOT NULL,
    member VARBINARY(802) NOT NULL,
    PRIMARY KEY (job, member)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

-- version: a random number. Each change of the note also changes this number. 0: there is no such note, and the row only
-- serves to lock the note's key.
-- expires_at: microseconds since 1970 of the server's clock. NULL: the note is kept.
CREATE TABLE IF NOT EXISTS multiq_notes (
    home VARBINARY(128) NOT NULL,
    name VARBINARY(800) NOT NULL,
    version BIGINT UNSIGNED NOT NULL,
    expires_at BIGINT NULL,
    content LONGBLOB NOT NULL,
    PRIMARY KEY (home, name),
    KEY multiq_notes_expiry (home, expires_at)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;
