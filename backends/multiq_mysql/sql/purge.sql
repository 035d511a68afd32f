-- By primary key, and only jobs that are still in that state: a claim may have come in between. The form is ack.sql's.
DELETE job FROM multiq_jobs AS job FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs}) AND state = {state}
