-- A page of the notes of a home. first: the lowest key that the page may have. beyond: a text that sorts after all keys with
-- the prefix.
SELECT name, content, version, expires_at - {now} FROM multiq_notes FORCE INDEX (PRIMARY)
WHERE home = {home} AND name >= {first} AND name <> {after} AND name < {beyond}
    AND (expires_at IS NULL OR expires_at > {now})
ORDER BY name
LIMIT {limit}
