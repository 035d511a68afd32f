-- The gates that have a row. Gates that another session has locked are included. The result may have more gates than the
-- caller asked for.
SELECT name, gate_key FROM multiq_gates FORCE INDEX (PRIMARY)
WHERE queue = {queue} AND name IN ({names}) AND gate_key IN ({keys})
