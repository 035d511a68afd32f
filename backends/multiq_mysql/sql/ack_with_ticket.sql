-- As ack.sql, and deletes a ticket (receipts.py) in the same statement. The ack is therefore still a single statement
-- and a transaction by itself. The ticket counts as a deleted row. It stays if no job is deleted.
DELETE job, ticket
FROM multiq_jobs AS job FORCE INDEX (PRIMARY), multiq_receipts AS ticket FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs}) AND token = {token} AND state = 2 AND place > {now} AND writer = {ticket}
