-- Returns which of the given members have already arrived at a held job. targets.sql has locked the job.
SELECT member FROM multiq_jobs FORCE INDEX (multiq_jobs_id)
STRAIGHT_JOIN multiq_arrivals FORCE INDEX (PRIMARY) ON job = seq
WHERE queue = {queue} AND id = {id} AND state = 5 AND member IN ({members})
