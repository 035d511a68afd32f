INSERT INTO multiq_opened (queue, name, key) VALUES (:queue, :name, :key)
