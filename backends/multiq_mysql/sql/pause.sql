-- Uses REPLACE, because MySQL and MariaDB have no common way to name the new value in ON DUPLICATE KEY UPDATE.
REPLACE INTO multiq_queues (queue, paused_until) VALUES ({queue}, {now} + {pause})
