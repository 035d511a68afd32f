-- Stores the last key of a limit that is done.
UPDATE multiq_gates FORCE INDEX (PRIMARY) SET closed_key = {key}
WHERE queue = {queue} AND name = '' AND gate_key = {name}
