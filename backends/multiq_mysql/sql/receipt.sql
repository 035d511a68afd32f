-- The last statement before a COMMIT. The first time, it inserts the connection's row. Later it updates this row in place.
INSERT INTO multiq_receipts (writer, number, done) VALUES ({writer}, {number}, {done})
ON DUPLICATE KEY UPDATE number = {number}, done = {done}
