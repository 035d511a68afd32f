SELECT seq, state, due_at FROM multiq_jobs WHERE queue = :queue AND id = :id
