-- Runs after lock_keys.sql, which has locked the row.
UPDATE multiq_unique FORCE INDEX (PRIMARY) SET id = {id}, held_until = {held_until}
WHERE queue = {queue} AND unique_key = {key}
