-- The first ready jobs of one priority behind a job that have gates, but none of the known texts of gates. It locks no row:
-- a locking read would lock all rows that it examines.
SELECT seq, gates FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
WHERE queue = {queue} AND state = {state} AND place = {place} AND seq > {seq} AND seq <= {end}
    AND gates NOT IN ({known})
ORDER BY seq
LIMIT {limit}
