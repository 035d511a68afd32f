-- The last statement before a COMMIT. It updates the connection's row in place, and inserts it the first time.
INSERT INTO multiq_receipts (writer, number, done) VALUES ({writer}, {number}, {done})
ON DUPLICATE KEY UPDATE number = {number}, done = {done}
