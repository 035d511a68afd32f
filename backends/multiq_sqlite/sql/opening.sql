-- Some gates for which jobs wait, and whose opening time has come. An empty name means that a change of a limit is not
-- finished.
SELECT name, key FROM multiq_rates INDEXED BY multiq_rates_opening
WHERE queue = :queue AND opens_at IS NOT NULL AND opens_at <= :now
ORDER BY opens_at
LIMIT :limit
