-- remove.sql explains the form and the second condition.
DELETE receipt FROM multiq_receipts AS receipt FORCE INDEX (PRIMARY)
WHERE writer IN ({writers}) AND done > -1
