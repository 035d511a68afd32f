-- Used when the first job of a fair line leaves the line. If the line waits for a gate of this job, the next reserve looks
-- at the line again.
UPDATE multiq_gates FORCE INDEX (PRIMARY) SET look_at = 0, closed_name = NULL, closed_key = NULL
WHERE queue = {queue} AND name = {name} AND gate_key = {key} AND closed_name IS NOT NULL
