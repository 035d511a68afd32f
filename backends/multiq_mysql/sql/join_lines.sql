INSERT INTO multiq_lines (queue, name, gate_key, priority, job) VALUES ({row})
ON DUPLICATE KEY UPDATE job = job
