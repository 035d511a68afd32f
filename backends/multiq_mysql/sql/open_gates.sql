-- Lets the next reserve check a slice of the gates of a limit whose quota has changed. If a gate would wait longer than the
-- new rate requires, its wait is shortened. Assignments are made from left to right.
UPDATE multiq_gates FORCE INDEX (PRIMARY)
SET due = LEAST(due, {latest}), look_at = IF(look_at IS NULL AND closed_name IS NULL, NULL, 0), closed_name = NULL,
    closed_key = NULL
WHERE queue = {queue} AND name = {name} AND gate_key >= {first} AND gate_key <= {key}
