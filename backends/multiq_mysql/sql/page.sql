-- A page of the jobs in one state, after the last job of the previous page. The condition reads two ranges of the index.
SELECT seq, id, state, place, priority, ttr, {now} - GREATEST(enqueued_at, 0), attempt, crashes, kicks, GREATEST(place, 0) - {now}, reason, body, memo, detail, awaits, unique_key, gates
FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
WHERE queue = {queue} AND state = {state} AND (place > {place} OR (place = {place} AND seq > {seq}))
ORDER BY place, seq
LIMIT {limit}
