REPLACE INTO multiq_leases (job, name, gate_key, queue, token) VALUES ({row})
