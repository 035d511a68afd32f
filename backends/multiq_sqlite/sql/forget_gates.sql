-- Records that the queue has neither limits nor jobs, so that its reserves do not look for gates.
DELETE FROM multiq_queues
WHERE queue = :queue AND has_gates AND paused_until = 0
    AND NOT EXISTS (SELECT 1 FROM multiq_limits WHERE multiq_limits.queue = :queue)
    AND NOT EXISTS (SELECT 1 FROM multiq_jobs WHERE multiq_jobs.queue = :queue)
