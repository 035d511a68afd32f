-- Stores the reason why a job that was held must not run. Such a job has neither a memo nor a detail.
INSERT INTO multiq_memos (seq, doomed) VALUES (:seq, :doomed) ON CONFLICT DO UPDATE SET doomed = excluded.doomed
