-- Writes a stock of tickets. The first row is never used, because it shows that the stock was written.
INSERT INTO multiq_receipts (writer, number, done) VALUES ({rows})
