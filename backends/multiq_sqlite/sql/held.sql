-- Which of these jobs are under a live lease, and under which. An ended lease is over even if nobody has noticed yet.
SELECT json_group_array(json_array(seq, token)) FROM multiq_jobs
WHERE seq IN (SELECT value FROM json_each(:seqs)) AND state = 2 AND due_at > :now
