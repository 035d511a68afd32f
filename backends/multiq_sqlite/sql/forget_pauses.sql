DELETE FROM multiq_queues WHERE paused_until <= :now
