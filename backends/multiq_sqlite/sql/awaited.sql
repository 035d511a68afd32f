-- Whether lines of fair limits wait for a gate.
SELECT 1 FROM multiq_turns INDEXED BY multiq_turns_closed
WHERE queue = :queue AND closed_name IS NOT NULL AND closed_name = :name AND closed_key = :key
LIMIT 1
