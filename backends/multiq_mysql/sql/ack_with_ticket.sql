-- ack.sql which takes a ticket with it (receipts.py): no statement more, and a transaction by itself. The ticket counts as
-- a row; it stays if no job is deleted.
DELETE job, ticket
FROM multiq_jobs AS job FORCE INDEX (PRIMARY), multiq_receipts AS ticket FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs}) AND token = {token} AND state = 2 AND place > {now} AND writer = {ticket}
