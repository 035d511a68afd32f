-- A slice of the delayed or the buried jobs. Jobs that were due when the purge began are ready, and were promoted before.
SELECT json_group_array(seq), count(*)
FROM (
    SELECT seq FROM multiq_jobs INDEXED BY multiq_jobs_waiting
    WHERE queue = :queue AND state <> 0 AND state = :state AND seq <= :newest
    LIMIT :limit
)
