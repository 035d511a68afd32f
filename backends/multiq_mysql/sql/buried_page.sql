-- Like buried.sql, but begins after a given job, also returns the unique keys, and locks no rows.
SELECT place, seq, id, unique_key FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
WHERE queue = {queue} AND state = 3 AND place < {behind} AND (place > {place} OR (place = {place} AND seq > {seq}))
ORDER BY place, seq
LIMIT {limit}
