-- Lets the next reserve check some of the fair lines that wait for a gate of a limit.
UPDATE multiq_gates FORCE INDEX (multiq_gates_closed)
SET look_at = 0, closed_name = NULL, closed_key = NULL
WHERE queue = {queue} AND closed_name = {name}
ORDER BY closed_key, turn
LIMIT {limit}
