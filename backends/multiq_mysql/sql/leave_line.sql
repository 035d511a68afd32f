-- Deletes a job's place in a line.
DELETE line FROM multiq_lines AS line FORCE INDEX (PRIMARY)
WHERE queue = {queue} AND name = {name} AND gate_key = {key} AND priority = {priority} AND job = {seq}
