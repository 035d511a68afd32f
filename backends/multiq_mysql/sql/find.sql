SELECT seq, state, place <= {now}, unique_key FROM multiq_jobs FORCE INDEX (multiq_jobs_id)
WHERE queue = {queue} AND id = {id}
