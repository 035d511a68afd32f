-- Receipts and tickets of connections that were closed long ago. Read without a lock: a DELETE of the range would also
-- wait for a transaction that has locked the first row behind it.
SELECT writer FROM multiq_receipts WHERE writer < {writer} ORDER BY writer LIMIT {limit}
