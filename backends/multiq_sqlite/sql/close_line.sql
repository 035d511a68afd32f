UPDATE multiq_turns SET closed_name = :closed_name, closed_key = :closed_key
WHERE queue = :queue AND name = :name AND key = :key
