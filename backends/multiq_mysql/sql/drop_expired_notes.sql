-- Like drop_expired.sql, for the notes of a home.
DELETE note FROM (
    SELECT home, name FROM multiq_notes FORCE INDEX (multiq_notes_expiry)
    WHERE home = {home} AND expires_at <= {now}
    ORDER BY expires_at
    LIMIT {limit}
    FOR UPDATE SKIP LOCKED
) AS expired STRAIGHT_JOIN multiq_notes AS note FORCE INDEX (PRIMARY)
ON note.home = expired.home AND note.name = expired.name
