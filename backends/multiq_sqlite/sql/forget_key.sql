-- Deletes the entry of a key whose job is gone.
DELETE FROM multiq_unique
WHERE key = :key AND queue = :queue AND held_until = 0 AND NOT EXISTS (
    SELECT 1 FROM multiq_memos AS own WHERE own.seq = multiq_unique.seq AND own.unique_key = multiq_unique.key
)
