DELETE FROM multiq_turns WHERE queue = :queue AND name = :name AND key = :key
