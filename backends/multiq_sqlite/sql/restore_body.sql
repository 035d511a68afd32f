-- Gives a job an empty body, because another program has deleted the job's body.
INSERT INTO multiq_bodies (seq, body) VALUES (:seq, x'')
