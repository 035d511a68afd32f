-- A slice of the keys of a limit that have a rate.
SELECT key FROM multiq_rates WHERE queue = :queue AND name = :name AND key >= :first ORDER BY key LIMIT :limit
