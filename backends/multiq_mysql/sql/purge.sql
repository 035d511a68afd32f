-- By primary key, and only what is still in that state: a claim may have come in between.
DELETE FROM multiq_jobs
WHERE seq IN ({seqs}) AND state = {state}
