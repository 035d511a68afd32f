-- Acks of one reserve's jobs. Only those whose lease has not ended are gone: the count tells whether that was all.
DELETE FROM multiq_jobs
WHERE seq IN ({seqs}) AND token = {token} AND state = 2 AND place > {now}
