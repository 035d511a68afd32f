-- Returns the ids of the new jobs that an earlier call has already added.
SELECT id FROM multiq_jobs FORCE INDEX (multiq_jobs_id) WHERE queue = {queue} AND id IN ({ids})
