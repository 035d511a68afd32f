-- Each connection creates these views in its temp schema. One INSERT of seqs into a view moves all these jobs.
-- `UPDATE ... WHERE seq IN (SELECT ...)` would do the same. But if an ANALYZE has run while the table was short, the planner
-- reads the whole table for such a statement, even after the table has become long. For `seq = ...` the planner always uses
-- the index.
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
    -- Only the kick of a buried job is counted.
    UPDATE multiq_jobs SET state = 0, due_at = 0, kicks = kicks + (state = 3) WHERE seq = new.seq;
END;

CREATE TEMP VIEW multiq_to_remove (seq) AS SELECT NULL;
CREATE TEMP TRIGGER multiq_removes INSTEAD OF INSERT ON multiq_to_remove
BEGIN
    DELETE FROM multiq_jobs WHERE seq = new.seq;
END;

CREATE TEMP VIEW multiq_to_note (seq, memo, detail, keeps_detail) AS SELECT NULL, NULL, NULL, NULL;
CREATE TEMP TRIGGER multiq_notes INSTEAD OF INSERT ON multiq_to_note
BEGIN
    -- A body of NULL means that the job may have a memo: see schema.sql.
    INSERT INTO multiq_bodies (seq, body) SELECT seq, body FROM multiq_jobs WHERE seq = new.seq AND body IS NOT NULL;
    UPDATE multiq_jobs SET body = NULL WHERE seq = new.seq AND body IS NOT NULL;
    INSERT INTO multiq_memos (seq, memo, detail) SELECT seq, new.memo, new.detail FROM multiq_jobs WHERE seq = new.seq
    ON CONFLICT DO UPDATE SET
        memo = coalesce(excluded.memo, memo), detail = iif(new.keeps_detail, detail, excluded.detail);
END;

CREATE TEMP VIEW multiq_to_place (seq) AS SELECT NULL;
CREATE TEMP TRIGGER multiq_places INSTEAD OF INSERT ON multiq_to_place
BEGIN
    DELETE FROM multiq_gates
    WHERE seq = new.seq AND NOT EXISTS (SELECT 1 FROM multiq_jobs WHERE multiq_jobs.seq = new.seq);
    UPDATE multiq_jobs SET state = 5, due_at = 0
    WHERE seq = new.seq AND state = 0 AND EXISTS (SELECT 1 FROM multiq_gates WHERE multiq_gates.seq = new.seq);
    -- If one of the gates is fair, the line is the line of this gate.
    UPDATE multiq_gates SET token = NULL, priority = CASE WHEN (name, key) = (
        SELECT own.name, own.key FROM multiq_gates AS own LEFT JOIN multiq_limits AS stored USING (queue, name)
        WHERE own.seq = new.seq
        ORDER BY coalesce(stored.fair, 0) DESC, own.name, own.key
        LIMIT 1
    ) THEN (SELECT priority FROM multiq_jobs WHERE multiq_jobs.seq = new.seq AND state IN (0, 5)) END
    WHERE seq = new.seq;
END;

CREATE TEMP VIEW multiq_to_forget_notes (seq) AS SELECT NULL;
CREATE TEMP TRIGGER multiq_forgets_notes INSTEAD OF INSERT ON multiq_to_forget_notes
BEGIN
    DELETE FROM multiq_notes WHERE seq = new.seq;
END;

CREATE TEMP VIEW multiq_to_forget (seq) AS SELECT NULL;
CREATE TEMP TRIGGER multiq_forgets INSTEAD OF INSERT ON multiq_to_forget
BEGIN
    DELETE FROM multiq_outcomes WHERE seq = new.seq;
END;
