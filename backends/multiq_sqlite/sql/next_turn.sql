SELECT key FROM multiq_turns INDEXED BY multiq_turns_open
WHERE queue = :queue AND name = :name AND closed_name IS NULL
ORDER BY priority, turn
LIMIT 1
