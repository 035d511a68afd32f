-- A slice of the expired notes of a home.
SELECT json_group_array(seq), count(*)
FROM (
    SELECT seq FROM multiq_notes INDEXED BY multiq_notes_expiry
    WHERE home = :home AND expires_at IS NOT NULL AND expires_at <= :now
    LIMIT :limit
)
