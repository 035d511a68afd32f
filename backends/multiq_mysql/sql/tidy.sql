-- The form and the second condition are remove.sql's.
DELETE receipt FROM multiq_receipts AS receipt FORCE INDEX (PRIMARY)
WHERE writer IN ({writers}) AND done > -1
