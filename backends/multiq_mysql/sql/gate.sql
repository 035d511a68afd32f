-- Locks a gate, unless another session has locked it. Returns the time at which the gate's rate is due, the time at which a
-- reserve must check the gate, and the gate's turn. Also returns whether the gate waits for another gate, whether other
-- lines wait for it, and whether it has a line.
SELECT due, look_at, turn, closed_name, closed_key,
    EXISTS (SELECT 1 FROM multiq_gates AS line FORCE INDEX (multiq_gates_closed)
            WHERE line.queue = {queue} AND line.closed_name = {name} AND line.closed_key = {key}),
    COALESCE((SELECT turn FROM multiq_gates AS other FORCE INDEX (multiq_gates_turn)
              WHERE other.queue = {queue} AND other.name = {name} ORDER BY turn DESC LIMIT 1), 0)
FROM multiq_gates FORCE INDEX (PRIMARY)
WHERE queue = {queue} AND name = {name} AND gate_key = {key}
FOR UPDATE SKIP LOCKED
