SELECT line.name, line.gate_key, COUNT(*)
FROM multiq_lines AS line FORCE INDEX (PRIMARY)
STRAIGHT_JOIN multiq_jobs AS job FORCE INDEX (PRIMARY) ON job.seq = line.job AND job.state = 6
WHERE line.queue = {queue}
GROUP BY line.name, line.gate_key
