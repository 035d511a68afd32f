-- Receipts of connections that are long gone.
DELETE FROM multiq_receipts WHERE writer > 0 AND writer < {writer} ORDER BY writer LIMIT 1000
