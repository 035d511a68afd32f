-- A page of delayed, reserved or buried jobs, after the last one of the page before.
SELECT seq, id, state, priority, due_at, ttr, enqueued_at, attempt, crashes, kicks, reason,
    coalesce(body, (SELECT body FROM multiq_bodies WHERE multiq_bodies.seq = job.seq))
FROM multiq_jobs AS job INDEXED BY multiq_jobs_waiting
WHERE queue = :queue AND state <> 0 AND state = :state AND (due_at, seq) > (:major, :minor)
ORDER BY due_at, seq
LIMIT :limit
