-- The last statement before a COMMIT. In place, but for a connection's first.
INSERT INTO multiq_receipts (writer, number, done) VALUES ({writer}, {number}, {done})
ON DUPLICATE KEY UPDATE number = {number}, done = {done}
