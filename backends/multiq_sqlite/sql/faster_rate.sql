-- Shortens the waits of gates to at most the wait that the new rate alone would cause.
UPDATE multiq_rates SET due = min(due, :latest), opens_at = NULL
WHERE queue = :queue AND name = :name AND key >= :first AND key <= :last AND (due > :latest OR opens_at IS NOT NULL)
