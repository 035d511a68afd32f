-- Ends a pause. forget_pauses.sql deletes the row.
UPDATE multiq_queues SET paused_until = 0 WHERE queue = :queue
