-- Used after a COMMIT whose reply was lost. The rows that the transaction changed must be locked first. The locks are
-- granted only after the transaction has ended.
SELECT writer, number, done FROM multiq_receipts WHERE writer IN ({writers})
