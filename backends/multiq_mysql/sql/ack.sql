-- Acks jobs of one reserve. Only jobs whose lease has not ended are deleted. The row count shows whether all jobs were
-- deleted. Only the multiple-table form of DELETE accepts an index hint. Without the hint, the DELETE of a batch that is
-- half of the table would scan the whole table, and would wait for every transaction that has locked a row.
DELETE job FROM multiq_jobs AS job FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs}) AND token = {token} AND state = 2 AND place > {now}
