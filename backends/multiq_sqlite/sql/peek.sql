SELECT seq, id, state, priority, due_at, ttr, enqueued_at, attempt, crashes, kicks, reason,
    CAST(coalesce(body, (SELECT body FROM multiq_bodies WHERE multiq_bodies.seq = job.seq)) AS BLOB),
    iif(body IS NULL, (SELECT CAST(memo AS BLOB) FROM multiq_memos WHERE multiq_memos.seq = job.seq), NULL),
    iif(body IS NULL, (SELECT CAST(detail AS BLOB) FROM multiq_memos WHERE multiq_memos.seq = job.seq), NULL),
    iif(state = 4, (SELECT awaits FROM multiq_terms WHERE multiq_terms.seq = job.seq), 0),
    iif(body IS NULL, (SELECT unique_key FROM multiq_memos WHERE multiq_memos.seq = job.seq), NULL)
FROM multiq_jobs AS job
WHERE queue = :queue AND id = :id
