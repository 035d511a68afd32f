-- A slice of the jobs that existed when the purge began. Later jobs are left out. So a busy producer cannot prolong the
-- purge for ever.
SELECT json_group_array(seq), count(*)
FROM (
    SELECT seq FROM multiq_jobs INDEXED BY multiq_jobs_ready
    WHERE queue = :queue AND state = 0 AND seq <= :newest
    LIMIT :limit
)
