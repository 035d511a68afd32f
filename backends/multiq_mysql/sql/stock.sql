-- Writes tickets. The first one is never used: it shows that the others were there.
INSERT INTO multiq_receipts (writer, number, done) VALUES ({rows})
