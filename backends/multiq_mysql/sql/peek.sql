SELECT seq, id, state, place, priority, ttr, {now} - GREATEST(enqueued_at, 0), attempt, crashes, kicks, GREATEST(place, 0) - {now}, reason, body, memo, detail, awaits, unique_key, gates
FROM multiq_jobs FORCE INDEX (multiq_jobs_id)
WHERE queue = {queue} AND id = {id}
