INSERT INTO multiq_queues (queue, paused_until, has_gates) VALUES (:queue, 0, 1)
ON CONFLICT DO UPDATE SET has_gates = 1 WHERE has_gates = 0
