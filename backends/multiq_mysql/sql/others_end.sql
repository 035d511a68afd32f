-- The number of the first ready jobs of one priority behind a job, up to so many, and the highest seq of them or NULL.
SELECT COUNT(*), MAX(seq) FROM (
    SELECT seq FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
    WHERE queue = {queue} AND state = {state} AND place = {place} AND seq > {seq}
    ORDER BY seq
    LIMIT {examined}
) AS behind
