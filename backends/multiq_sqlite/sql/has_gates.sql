SELECT 1 FROM multiq_queues WHERE queue = :queue AND has_gates
