-- Each connection creates these views in its temp schema. One INSERT of seqs into a view moves all these jobs.
-- `UPDATE ... WHERE seq IN (SELECT ...)` would do the same. But after an ANALYZE of a short table, the planner would read
-- the whole table for it, even if the table has become long. For an equality, the planner always uses the index.
CREATE TEMP VIEW multiq_to_reserve (seq, token, now) AS SELECT NULL, NULL, NULL;
CREATE TEMP TRIGGER multiq_reserves INSTEAD OF INSERT ON multiq_to_reserve
BEGIN
    UPDATE multiq_jobs SET state = 2, token = new.token, due_at = new.now + ttr, attempt = attempt + 1
    WHERE seq = new.seq;
END;

CREATE TEMP VIEW multiq_to_touch (seq, now) AS SELECT NULL, NULL;
CREATE TEMP TRIGGER multiq_touches INSTEAD OF INSERT ON multiq_to_touch
BEGIN
    UPDATE multiq_jobs SET due_at = new.now + ttr WHERE seq = new.seq;
END;

CREATE TEMP VIEW multiq_to_give_back (seq, state, due_at) AS SELECT NULL, NULL, NULL;
CREATE TEMP TRIGGER multiq_gives_back INSTEAD OF INSERT ON multiq_to_give_back
BEGIN
    UPDATE multiq_jobs SET state = new.state, due_at = new.due_at, token = NULL, attempt = attempt - 1
    WHERE seq = new.seq;
END;

CREATE TEMP VIEW multiq_to_promote (seq) AS SELECT NULL;
CREATE TEMP TRIGGER multiq_promotes INSTEAD OF INSERT ON multiq_to_promote
BEGIN
    -- a lease that ended counts as a crash
    UPDATE multiq_jobs SET state = 0, due_at = 0, token = NULL, crashes = crashes + (state = 2) WHERE seq = new.seq;
END;

CREATE TEMP VIEW multiq_to_kick (seq) AS SELECT NULL;
CREATE TEMP TRIGGER multiq_kicks INSTEAD OF INSERT ON multiq_to_kick
BEGIN
    -- a delayed job is kicked without having been buried
    UPDATE multiq_jobs SET state = 0, due_at = 0, kicks = kicks + (state = 3) WHERE seq = new.seq;
END;

CREATE TEMP VIEW multiq_to_remove (seq) AS SELECT NULL;
CREATE TEMP TRIGGER multiq_removes INSTEAD OF INSERT ON multiq_to_remove
BEGIN
    DELETE FROM multiq_jobs WHERE seq = new.seq;
END;
