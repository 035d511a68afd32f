-- A slice of the due jobs in one state, delayed or reserved.
SELECT json_group_array(seq), count(*)
FROM (
    SELECT seq FROM multiq_jobs INDEXED BY multiq_jobs_waiting
    WHERE queue = :queue AND state <> 0 AND state = :state AND due_at <= :now
    LIMIT :limit
)
