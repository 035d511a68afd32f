-- A page of the buried jobs in the order in which they are kicked, with their unique keys.
SELECT seq, due_at, (SELECT unique_key FROM multiq_memos WHERE multiq_memos.seq = job.seq)
FROM multiq_jobs AS job INDEXED BY multiq_jobs_waiting
WHERE queue = :queue AND state <> 0 AND state = 3 AND due_at >= :due_at AND (due_at > :due_at OR seq > :seq)
ORDER BY due_at, seq
LIMIT :limit
