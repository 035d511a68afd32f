-- Records that the key is no longer held by time. From now on, the deletion of the job also deletes the key's entry.
UPDATE multiq_unique SET held_until = 0 WHERE key = :key AND queue = :queue
