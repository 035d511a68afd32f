-- Locks gates that must be checked. Other consumers skip the locked gates.
SELECT name, gate_key FROM multiq_gates FORCE INDEX (multiq_gates_look)
WHERE queue = {queue} AND look_at <= {now}
ORDER BY look_at
LIMIT {limit}
FOR UPDATE SKIP LOCKED
