SELECT leased.name, leased.gate_key, COUNT(*)
FROM multiq_leases AS leased FORCE INDEX (multiq_leases_gate)
STRAIGHT_JOIN multiq_jobs AS job FORCE INDEX (PRIMARY)
ON job.seq = leased.job AND job.token = leased.token AND job.state = 2 AND job.place > {now}
WHERE leased.queue = {queue}
GROUP BY leased.name, leased.gate_key
