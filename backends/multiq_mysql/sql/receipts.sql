-- Used after a COMMIT whose reply was lost. The caller must first lock the rows that the transaction changed. The server
-- grants these locks only after the transaction has ended. If it is possible that a transaction locks no rows of jobs,
-- the transaction writes its receipt as its first statement. In this case, {lock} is FOR UPDATE.
SELECT writer, number, done FROM multiq_receipts WHERE writer IN ({writers}) {lock}
