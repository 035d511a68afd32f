-- Inserts a large body, after its job. A job that existed already has its own body, here or in its row.
INSERT INTO multiq_bodies (seq, body)
SELECT seq, :body FROM multiq_jobs WHERE queue = :queue AND id = :id AND body IS NULL
ON CONFLICT DO NOTHING
