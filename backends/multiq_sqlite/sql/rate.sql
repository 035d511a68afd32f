SELECT due FROM multiq_rates WHERE queue = :queue AND name = :name AND key = :key
