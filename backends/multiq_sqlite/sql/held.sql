-- Which of these jobs are under a live lease, and under which. An ended lease does not count even if its job is not promoted yet.
-- CROSS JOIN keeps the planner from reading all jobs to find these few.
SELECT json_group_array(json_array(seq, token))
FROM json_each(:seqs) CROSS JOIN multiq_jobs ON seq = value
WHERE state = 2 AND due_at > :now
