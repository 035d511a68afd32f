-- Deletes jobs by primary key, if they are still in the given state. The state is checked, because another consumer may have
-- reserved a job after it was found. ack.sql explains the form.
DELETE job FROM multiq_jobs AS job FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs}) AND state = {state}
