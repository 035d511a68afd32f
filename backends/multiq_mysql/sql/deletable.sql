-- Locks the jobs of a delete_many, in the order of their ids. Shows which of them have no live lease, and which are parked.
SELECT seq, id, attempt, state <> 2 OR place <= {now}, state = 6 FROM multiq_jobs FORCE INDEX (multiq_jobs_id)
WHERE queue = {queue} AND id IN ({ids})
ORDER BY id
FOR UPDATE
