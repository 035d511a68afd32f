-- Fair lines that wait for one of the first gates that must be checked. The derived table has a LIMIT, because otherwise the
-- server would read all gates that must be checked. It reads more gates than one transaction checks. So these lines do not
-- wait for many other lines whose gates are open.
SELECT line.name, line.gate_key FROM (
    SELECT queue, name, gate_key FROM multiq_gates FORCE INDEX (multiq_gates_look)
    WHERE queue = {queue} AND look_at <= {now}
    ORDER BY look_at
    LIMIT {examined}
) AS gate STRAIGHT_JOIN multiq_gates AS line FORCE INDEX (multiq_gates_closed)
ON line.queue = gate.queue AND line.closed_name = gate.name AND line.closed_key = gate.gate_key
LIMIT {limit}
