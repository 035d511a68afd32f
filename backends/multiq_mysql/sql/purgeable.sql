-- A slice of what was there when the purge began: a busy producer must not keep it going for ever.
SELECT place, seq FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
WHERE queue = {queue} AND state = {state} AND seq <= {newest}
    AND (place > {place} OR (place = {place} AND seq > {seq}))
ORDER BY place, seq
LIMIT {limit}
