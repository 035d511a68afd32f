-- Adds a gate to a new job. If the job is parked and is_line is 1, the job waits in the line of this gate.
INSERT INTO multiq_gates (seq, queue, name, key, priority)
SELECT seq, queue, :name, :key, iif(:is_line AND state = 5, priority, NULL) FROM multiq_jobs
WHERE queue = :queue AND id = :id
ON CONFLICT DO NOTHING
