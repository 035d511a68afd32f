-- The first jobs of a line. The gates are NULL if the job is no longer parked.
SELECT line.priority, line.job, job.gates
FROM multiq_lines AS line FORCE INDEX (PRIMARY)
LEFT JOIN multiq_jobs AS job FORCE INDEX (PRIMARY) ON job.seq = line.job AND job.state = 6
WHERE line.queue = {queue} AND line.name = {name} AND line.gate_key = {key}
ORDER BY line.priority, line.job
LIMIT {limit}
