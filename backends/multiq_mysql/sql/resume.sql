DELETE FROM multiq_queues WHERE queue = {queue}
