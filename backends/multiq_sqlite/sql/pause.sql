INSERT INTO multiq_queues (queue, paused_until) VALUES (:queue, :until)
ON CONFLICT DO UPDATE SET paused_until = excluded.paused_until
