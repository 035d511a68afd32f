DELETE FROM multiq_rates WHERE queue = :queue AND name = '' AND key = :key
