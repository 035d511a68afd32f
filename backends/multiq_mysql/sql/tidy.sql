-- The form and the second condition are those of remove.sql.
DELETE receipt FROM multiq_receipts AS receipt FORCE INDEX (PRIMARY)
WHERE writer IN ({writers}) AND done > -1
