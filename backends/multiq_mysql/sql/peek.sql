SELECT seq, id, state, place, priority, ttr, {now} - enqueued_at, attempt, crashes, kicks, place - {now}, reason, body
FROM multiq_jobs FORCE INDEX (multiq_jobs_id)
WHERE queue = {queue} AND id = {id}
