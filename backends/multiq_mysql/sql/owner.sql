-- Locks a job that is to be replaced, and reads it again, because another session may have reserved or deleted it meanwhile.
SELECT seq, state, state IN (1, 2) AND place <= {now}, attempt, {now} - GREATEST(enqueued_at, 0), unique_key
FROM multiq_jobs FORCE INDEX (multiq_jobs_id)
WHERE queue = {queue} AND id = {id}
FOR UPDATE
