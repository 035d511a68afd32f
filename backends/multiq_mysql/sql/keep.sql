-- Stores outcomes. They replace older outcomes of the same ids. MySQL and MariaDB have no better way in common (see
-- pause.sql). Assignments are made from left to right, so expires_at is computed from kept_at.
REPLACE INTO multiq_outcomes (queue, id, kind, kept_at, expires_at, attempt, `body`) VALUES ({row})
