-- After a COMMIT whose reply was lost. Run once the rows that it changed are locked: then that transaction has ended.
SELECT writer, number, done FROM multiq_receipts WHERE writer IN ({writers})
