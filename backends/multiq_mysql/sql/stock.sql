-- Writes a stock of tickets. The first row is never used for an ack, because it shows that the stock was written.
INSERT INTO multiq_receipts (writer, number, done) VALUES ({rows})
