-- Gives a turn to a line of a limit that is fair from now on.
INSERT OR IGNORE INTO multiq_turns (queue, name, key, priority, turn)
VALUES (:queue, :name, :key, 0, 1 + coalesce((SELECT max(turn) FROM multiq_turns WHERE queue = :queue AND name = :name), 0))
