-- Records that the job is no longer held. forget_terms.sql deletes what the job has waited for.
UPDATE multiq_jobs SET state = :state, due_at = :due_at WHERE seq = :seq
