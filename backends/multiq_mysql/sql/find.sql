SELECT state, place <= {now} FROM multiq_jobs FORCE INDEX (multiq_jobs_id) WHERE queue = {queue} AND id = {id}
