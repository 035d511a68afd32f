-- Version 1 counted no kicks and kept every body in its job's row.
ALTER TABLE multiq_jobs ADD COLUMN kicks INTEGER NOT NULL DEFAULT 0;

CREATE TABLE multiq_bodies (seq INTEGER PRIMARY KEY, body BLOB NOT NULL);
INSERT INTO multiq_bodies (seq, body) SELECT seq, body FROM multiq_jobs WHERE length(body) > 2048;
UPDATE multiq_jobs SET body = NULL WHERE length(body) > 2048;

CREATE TRIGGER multiq_bodies_follow_their_job AFTER DELETE ON multiq_jobs WHEN old.body IS NULL
BEGIN
    DELETE FROM multiq_bodies WHERE seq = old.seq;
END;

UPDATE multiq_schema SET version = 2;
