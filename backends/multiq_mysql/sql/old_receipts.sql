-- Finds, without a lock, the receipts and tickets of connections that were closed long ago. A DELETE of the whole range
-- would also wait for a transaction that has locked the first row after the range.
SELECT writer FROM multiq_receipts WHERE writer < {writer} ORDER BY writer LIMIT {limit}
