-- Ends the turn of a key. All other keys that wait have their turns before the next turn of this key. priority: the
-- priority of the next job of the line.
UPDATE multiq_turns SET priority = :priority, turn = 1 + (
    SELECT max(turn) FROM multiq_turns AS other WHERE other.queue = :queue AND other.name = :name
)
WHERE queue = :queue AND name = :name AND key = :key
