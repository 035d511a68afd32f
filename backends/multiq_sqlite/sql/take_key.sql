INSERT OR REPLACE INTO multiq_unique (key, queue, id, seq, held_until)
SELECT :key, queue, id, seq, :held_until FROM multiq_jobs WHERE seq = :seq
