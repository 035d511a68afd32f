-- Locks the entries of unique keys, until the end of the transaction. If a key has no entry, inserts one that names the job
-- that wants the key. InnoDB locks the row of a primary key without a gap. This is also true under REPEATABLE READ.
INSERT INTO multiq_unique (queue, unique_key, id, held_until) VALUES ({row})
ON DUPLICATE KEY UPDATE held_until = held_until
