-- REPLACE, because MySQL and MariaDB do not share a way to name the new value in ON DUPLICATE KEY UPDATE.
REPLACE INTO multiq_queues (queue, paused_until) VALUES ({queue}, {now} + {pause})
