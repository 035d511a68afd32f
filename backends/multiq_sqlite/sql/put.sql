INSERT INTO multiq_notes (home, key, version, value, expires_at)
VALUES (:home, :key, :version, :value, :expires_at)
ON CONFLICT (home, key) DO UPDATE
SET version = excluded.version, value = excluded.value, expires_at = excluded.expires_at
