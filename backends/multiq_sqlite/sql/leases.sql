-- The number of live leases of a gate. A row whose job has lost its lease does not count.
SELECT count(*)
FROM multiq_gates AS leased INDEXED BY multiq_gates_leases
    CROSS JOIN multiq_jobs AS job ON job.seq = leased.seq AND job.token = leased.token
WHERE leased.queue = :queue AND leased.name = :name AND leased.key = :key AND leased.token IS NOT NULL
    AND job.state = 2 AND job.due_at > :now
