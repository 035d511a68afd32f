SELECT due - {now} FROM multiq_gates FORCE INDEX (PRIMARY)
WHERE queue = {queue} AND name = {name} AND gate_key = {key}
