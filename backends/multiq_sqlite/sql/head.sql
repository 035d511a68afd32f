-- The first job of a line, in the form of ready.sql.
SELECT job.seq, job.id, job.priority, ttr, attempt, crashes, kicks, enqueued_at, 1
FROM multiq_gates AS line INDEXED BY multiq_gates_lines CROSS JOIN multiq_jobs AS job ON job.seq = line.seq
WHERE line.queue = :queue AND line.name = :name AND line.key = :key AND line.priority IS NOT NULL AND job.state IN (0, 5)
ORDER BY line.priority, line.seq
LIMIT 1
