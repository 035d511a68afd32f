-- The seq of the ready job after so many ready jobs of one priority behind a job. No row: there is no such job.
SELECT seq FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
WHERE queue = {queue} AND state = {state} AND place = {place} AND seq > {seq}
ORDER BY seq
LIMIT {examined}, 1
