-- For each lease of a gate, the time until the lease ends. NULL: the job no longer has this lease.
SELECT leased.job, job.place - {now}
FROM multiq_leases AS leased FORCE INDEX (multiq_leases_gate)
LEFT JOIN multiq_jobs AS job FORCE INDEX (PRIMARY)
ON job.seq = leased.job AND job.token = leased.token AND job.state = 2
WHERE leased.queue = {queue} AND leased.name = {name} AND leased.gate_key = {key}
