-- After a COMMIT whose reply was lost. Asked once the rows that it changed are locked: then it has ended.
SELECT writer, number, done FROM multiq_receipts WHERE writer IN ({writers})
