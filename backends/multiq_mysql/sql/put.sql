REPLACE INTO multiq_notes (home, name, version, expires_at, content) VALUES ({row})
