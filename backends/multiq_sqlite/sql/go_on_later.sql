-- Stores the key at which the change of a limit has to continue.
INSERT OR REPLACE INTO multiq_rates (queue, name, key, due, opens_at) VALUES (:queue, '', :key, 0, 0)
