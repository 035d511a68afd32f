-- The jobs that have a live lease, with the tokens of their leases. A lease that has ended does not count, even if its
-- job is not promoted yet.
-- CROSS JOIN keeps the planner from reading all jobs to find these few jobs.
SELECT json_group_array(json_array(seq, token))
FROM json_each(:seqs) CROSS JOIN multiq_jobs ON seq = value
WHERE state = 2 AND due_at > :now
