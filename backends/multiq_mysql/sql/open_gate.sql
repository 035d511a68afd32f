-- Lets the next reserve check a gate. The line of an open fair gate has a time before 2006 (2 to the power of 50). It is checked
-- at its turn anyway. The statement is a transaction by itself, so that the session never holds two locks.
UPDATE multiq_gates FORCE INDEX (PRIMARY) SET look_at = 0
WHERE queue = {queue} AND name = {name} AND gate_key = {key} AND look_at > 1125899906842624
