-- Acks of one reserve's jobs. Only those whose lease has not ended are gone: the count tells whether that was all.
DELETE job FROM multiq_jobs AS job FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs}) AND token = {token} AND state = 2 AND place > {now}
