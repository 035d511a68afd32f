-- Locks the key of a note. If the key has no row, inserts a row that has already expired. No call returns such a row.
INSERT INTO multiq_notes (home, name, version, expires_at, content) VALUES ({home}, {name}, 0, 0, x'')
ON DUPLICATE KEY UPDATE version = version
