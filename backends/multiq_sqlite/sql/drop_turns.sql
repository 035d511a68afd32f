-- Deletes a slice of the turns of a limit that is no longer fair.
DELETE FROM multiq_turns WHERE seq IN (
    SELECT seq FROM multiq_turns WHERE queue = :queue AND name = :name LIMIT :limit
)
