-- As ack.sql, and deletes a ticket in the same statement (receipts.py), so that the receipt costs no statement more and
-- the ack is still a transaction by itself. The ticket counts as a row; it stays if no job is deleted.
DELETE job, ticket
FROM multiq_jobs AS job FORCE INDEX (PRIMARY), multiq_receipts AS ticket FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs}) AND token = {token} AND state = 2 AND place > {now} AND writer = {ticket}
