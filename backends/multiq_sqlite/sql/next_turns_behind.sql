-- The lines of a fair limit that wait for a gate, in the order of their turns.
SELECT key, priority, turn FROM multiq_turns INDEXED BY multiq_turns_closed
WHERE queue = :queue AND closed_name IS NOT NULL AND closed_name = :closed_name AND closed_key = :closed_key AND name = :name
ORDER BY priority, turn
LIMIT :limit
