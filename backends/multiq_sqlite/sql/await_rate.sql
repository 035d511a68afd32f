UPDATE multiq_rates SET opens_at = :opens_at WHERE queue = :queue AND name = :name AND key = :key
