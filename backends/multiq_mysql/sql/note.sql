SELECT name, content, version, expires_at - {now} FROM multiq_notes FORCE INDEX (PRIMARY)
WHERE home = {home} AND name = {name} AND (expires_at IS NULL OR expires_at > {now})
