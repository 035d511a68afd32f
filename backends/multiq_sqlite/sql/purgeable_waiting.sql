-- A slice of the delayed, the buried or the held jobs. The purge makes the due jobs ready before it runs this statement.
SELECT json_group_array(seq), count(*)
FROM (
    SELECT seq FROM multiq_jobs INDEXED BY multiq_jobs_waiting
    WHERE queue = :queue AND state <> 0 AND state = :state AND seq <= :newest
    LIMIT :limit
)
