-- Gates for which lines of fair limits wait, although the first job of an open line has the gate, too. Only the open lines
-- with the next turns are read. A gate may be in several rows.
SELECT gate.name, gate.key
FROM (
    SELECT key FROM multiq_turns INDEXED BY multiq_turns_open
    WHERE queue = :queue AND name = :name AND closed_name IS NULL
    ORDER BY priority, turn
    LIMIT :limit
) AS open_line
CROSS JOIN multiq_gates AS gate ON gate.seq = (
    SELECT line.seq FROM multiq_gates AS line INDEXED BY multiq_gates_lines CROSS JOIN multiq_jobs AS job ON job.seq = line.seq
    WHERE line.queue = :queue AND line.name = :name AND line.key = open_line.key AND line.priority IS NOT NULL
        AND job.state IN (0, 5)
    ORDER BY line.priority, line.seq
    LIMIT 1
)
WHERE EXISTS (
    SELECT 1 FROM multiq_turns AS waiting INDEXED BY multiq_turns_closed
    WHERE waiting.queue = :queue AND waiting.closed_name IS NOT NULL AND waiting.closed_name = gate.name
        AND waiting.closed_key = gate.key
)
