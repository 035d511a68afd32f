SELECT seq, state, due_at, body IS NULL FROM multiq_jobs WHERE queue = :queue AND id = :id
