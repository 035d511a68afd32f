SELECT seq, held_until FROM multiq_unique WHERE key = :key AND queue = :queue
