-- A slice of the buried jobs, the longest buried first. A kick makes the jobs of its slice ready, so the next slice needs no
-- cursor. The third column is the number of jobs with a unique key.
SELECT json_group_array(seq), count(*), total(
    EXISTS (SELECT 1 FROM multiq_memos AS own WHERE own.seq = found.seq AND unique_key IS NOT NULL)
)
FROM (
    SELECT seq FROM multiq_jobs INDEXED BY multiq_jobs_waiting
    WHERE queue = :queue AND state <> 0 AND state = 3
    ORDER BY due_at, seq
    LIMIT :limit
) AS found
