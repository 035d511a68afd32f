-- The changes of limits that are not finished.
SELECT key FROM multiq_rates WHERE queue = :queue AND name = ''
