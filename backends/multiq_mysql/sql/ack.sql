-- Acks of one reserve's jobs. Only those whose lease has not ended are gone: the count tells whether that was all.
-- In the form for several tables, the only one that takes a hint: without it a batch of half of the table reads all of
-- it, and waits for whoever has locked any row.
DELETE job FROM multiq_jobs AS job FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs}) AND token = {token} AND state = 2 AND place > {now}
