-- Keys that were held by time, and whose time is over. The statement has no INDEXED BY, because it also runs on the caller's
-- connection. There, the file may be attached under another name, and SQLite does not accept a qualified name in INDEXED BY.
SELECT key FROM multiq_unique
WHERE queue = :queue AND held_until > 0 AND held_until <= :now
LIMIT 2
