-- Deletes some expired outcomes, the longest expired first. A DELETE with a LIMIT could not skip locked rows, so all
-- consumers would wait for the same rows. The inner SELECT skips rows that another session is deleting, and locks other
-- rows. It is a derived table with a LIMIT. MySQL and MariaDB both evaluate such a table first. scan_window.py explains
-- floor.
DELETE outcome FROM (
    SELECT queue, id FROM multiq_outcomes FORCE INDEX (multiq_outcomes_expiry)
    WHERE queue = {queue} AND expires_at > {floor} AND expires_at <= {now}
    ORDER BY expires_at, id
    LIMIT {limit}
    FOR UPDATE SKIP LOCKED
) AS expired STRAIGHT_JOIN multiq_outcomes AS outcome FORCE INDEX (PRIMARY)
ON outcome.queue = expired.queue AND outcome.id = expired.id
