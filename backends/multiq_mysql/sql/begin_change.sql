-- Stores that all gates of a limit have to be looked at, because its quota has changed. If the slices of an earlier change are
-- not done yet, they begin again.
INSERT INTO multiq_gates (queue, name, gate_key, due, look_at, turn) VALUES ({queue}, '', {name}, 0, 0, 0)
ON DUPLICATE KEY UPDATE closed_key = NULL
