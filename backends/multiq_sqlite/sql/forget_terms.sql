-- Deletes what a job waits for. A trigger deletes the job's arrivals.
DELETE FROM multiq_terms WHERE seq = :seq
