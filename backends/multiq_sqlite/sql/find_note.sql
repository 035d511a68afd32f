SELECT seq, key, version, expires_at, CAST(value AS BLOB)
FROM multiq_notes
WHERE home = :home AND key = :key AND (expires_at IS NULL OR expires_at > :now)
