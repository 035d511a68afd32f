-- Deletes some gates for which no job waits, and whose rate would allow a job now. drop_expired.sql explains the form.
DELETE gate FROM (
    SELECT queue, name, gate_key FROM multiq_gates FORCE INDEX (multiq_gates_look)
    WHERE queue = {queue} AND look_at IS NULL AND due <= {now} AND closed_name IS NULL
    ORDER BY due
    LIMIT {limit}
    FOR UPDATE SKIP LOCKED
) AS past STRAIGHT_JOIN multiq_gates AS gate FORCE INDEX (PRIMARY)
ON gate.queue = past.queue AND gate.name = past.name AND gate.gate_key = past.gate_key
