-- The open lines of a fair limit, in the order of their turns.
SELECT key, priority, turn FROM multiq_turns INDEXED BY multiq_turns_open
WHERE queue = :queue AND name = :name AND closed_name IS NULL
ORDER BY priority, turn
LIMIT :limit
