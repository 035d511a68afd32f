-- Keeps the outcome of a reserved job, before the job is deleted. A later outcome of the same id replaces the earlier one.
-- For several jobs, the driver repeats the group after VALUES: enqueue.sql gives the reason. CROSS JOIN keeps the
-- planner from reading all jobs to find these few jobs.
INSERT OR REPLACE INTO multiq_outcomes (queue, id, attempt, kept_at, kind, expires_at, body)
SELECT queue, id, attempt, column2, column3, column4, column5
FROM (VALUES (?, ?, ?, ?, ?)) CROSS JOIN multiq_jobs ON seq = column1
