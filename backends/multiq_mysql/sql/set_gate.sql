UPDATE multiq_gates FORCE INDEX (PRIMARY)
SET due = {due}, look_at = {look_at}, turn = {turn}, closed_name = {closed_name}, closed_key = {closed_key}
WHERE queue = {queue} AND name = {name} AND gate_key = {key}
