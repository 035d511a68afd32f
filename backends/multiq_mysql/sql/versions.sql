-- Locks notes that a condition names.
SELECT name, version FROM multiq_notes FORCE INDEX (PRIMARY)
WHERE home = {home} AND name IN ({names}) AND (expires_at IS NULL OR expires_at > {now})
ORDER BY name
FOR UPDATE
