-- Like ack.sql, but this statement also deletes a ticket (receipts.py). So the ack is still a single statement and a
-- transaction by itself. The row count includes the ticket. If no job is deleted, the ticket stays.
DELETE job, ticket
FROM multiq_jobs AS job FORCE INDEX (PRIMARY), multiq_receipts AS ticket FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs}) AND token = {token} AND state = 2 AND place > {now} AND writer = {ticket}
