-- The gates of a job, and the gate in whose line the job waits.
SELECT name, key, priority IS NOT NULL FROM multiq_gates WHERE seq = :seq
