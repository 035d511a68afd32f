-- A slice of the jobs that have arrivals. Shows for each job whether it is no longer held. Jumps from job to job through the
-- index.
SELECT job, COALESCE(state <> 5, 1) FROM (
    SELECT job FROM multiq_arrivals FORCE INDEX (PRIMARY) WHERE job > {after} GROUP BY job ORDER BY job LIMIT {limit}
) AS found LEFT JOIN multiq_jobs FORCE INDEX (PRIMARY) ON seq = job
ORDER BY job
