-- A page of the jobs in one state, after the last job of the page before. The condition reads two ranges of the index.
SELECT seq, id, state, place, priority, ttr, {now} - GREATEST(enqueued_at, 0), attempt, crashes, kicks, GREATEST(place, 0) - {now}, reason, body
FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
WHERE queue = {queue} AND state = {state} AND (place > {place} OR (place = {place} AND seq > {seq}))
ORDER BY place, seq
LIMIT {limit}
