-- A large body, after its job. If the job was there already, so is its body, or it has a small one in its row.
INSERT INTO multiq_bodies (seq, body)
SELECT seq, :body FROM multiq_jobs WHERE queue = :queue AND id = :id AND body IS NULL
ON CONFLICT DO NOTHING
