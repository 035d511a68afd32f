-- A slice of the jobs that existed when the purge began. Later jobs are left out. So a busy producer cannot prolong the
-- purge for ever.
SELECT place, seq FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
WHERE queue = {queue} AND state = {state} AND seq <= {newest}
    AND (place > {place} OR (place = {place} AND seq > {seq}))
ORDER BY place, seq
LIMIT {limit}
