-- remove.sql explains the form and the last condition.
DELETE gate FROM multiq_gates AS gate FORCE INDEX (PRIMARY)
WHERE queue = {queue} AND name = '' AND gate_key = {name} AND turn >= 0
