-- Inserts a large body, after its job. If the job existed already, its own body stays, in this table or in the job's row.
INSERT INTO multiq_bodies (seq, body)
SELECT seq, :body FROM multiq_jobs WHERE queue = :queue AND id = :id AND body IS NULL
ON CONFLICT DO NOTHING
