-- Acks jobs of one reserve. Only jobs whose lease has not ended are deleted. The row count shows whether all were.
-- Only the multiple-table form of DELETE takes an index hint. Without the hint, a batch of half of the table scans the
-- whole table, and waits for every transaction that has locked a row.
DELETE job FROM multiq_jobs AS job FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs}) AND token = {token} AND state = 2 AND place > {now}
