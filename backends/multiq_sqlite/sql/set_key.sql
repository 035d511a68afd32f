-- Stores a job's unique key. The job has no row in this table yet: it is new, or its reschedule has deleted the row.
INSERT OR REPLACE INTO multiq_memos (seq, unique_key, unique_until) VALUES (:seq, :key, :until)
