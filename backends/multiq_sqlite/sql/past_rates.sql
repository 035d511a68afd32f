-- Rates that no longer close a gate, because their time is in the past.
SELECT name, key FROM multiq_rates INDEXED BY multiq_rates_past
WHERE queue = :queue AND opens_at IS NULL AND due <= :now
LIMIT 2
