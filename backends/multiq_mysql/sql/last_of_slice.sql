-- The last key of a slice of a limit's gates. No row: there are fewer gates from the first key on. Locks nothing.
SELECT gate_key FROM multiq_gates FORCE INDEX (PRIMARY)
WHERE queue = {queue} AND name = {name} AND gate_key >= {first}
ORDER BY gate_key
LIMIT 1 OFFSET {before}
