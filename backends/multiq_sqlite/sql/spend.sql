INSERT INTO multiq_rates (queue, name, key, due) VALUES (:queue, :name, :key, :due)
ON CONFLICT DO UPDATE SET due = excluded.due, opens_at = NULL
