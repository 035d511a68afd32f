DELETE FROM multiq_limits WHERE queue = :queue AND name = :name
