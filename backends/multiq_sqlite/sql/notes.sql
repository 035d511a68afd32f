-- A page of the notes whose keys are at least :first and less than :end. A second condition for the lower bound would make
-- the statement slower, because SQLite would use only one of the two conditions to search the index.
SELECT seq, key, version, expires_at, CAST(value AS BLOB)
FROM multiq_notes INDEXED BY multiq_notes_key
WHERE home = :home AND key >= :first AND key < :end AND (expires_at IS NULL OR expires_at > :now)
ORDER BY key
LIMIT :limit
