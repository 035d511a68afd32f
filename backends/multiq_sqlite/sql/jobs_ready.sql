-- A page of ready jobs in the order of reserve, after the last one of the page before.
SELECT seq, id, state, priority, due_at, ttr, enqueued_at, attempt, crashes, kicks, reason,
    coalesce(body, (SELECT body FROM multiq_bodies WHERE multiq_bodies.seq = job.seq))
FROM multiq_jobs AS job INDEXED BY multiq_jobs_ready
WHERE queue = :queue AND state = 0 AND (priority, seq) > (:major, :minor)
ORDER BY priority, seq
LIMIT :limit
