-- Receipts and tickets of connections that are long gone. Without a lock: a DELETE of the range would also wait for
-- whoever has locked the first row behind it.
SELECT writer FROM multiq_receipts WHERE writer < {writer} ORDER BY writer LIMIT {limit}
