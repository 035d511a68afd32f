-- Locks the mark of a change. Returns the last key that was done. {lock} says whether the statement waits for another session
-- that has locked the mark.
SELECT closed_key FROM multiq_gates FORCE INDEX (PRIMARY)
WHERE queue = {queue} AND name = '' AND gate_key = {name}
FOR UPDATE {lock}
