DELETE FROM multiq_queues WHERE paused_until <= :now AND NOT has_gates
