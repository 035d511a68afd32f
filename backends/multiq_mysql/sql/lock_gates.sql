-- Locks gates until the end of the transaction. A gate without a row gets a row.
INSERT INTO multiq_gates (queue, name, gate_key, due, look_at, turn) VALUES ({row})
ON DUPLICATE KEY UPDATE due = due
