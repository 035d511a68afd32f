-- Clears the memo, the detail and the doom of a replaced job. The job's unique key stays.
UPDATE multiq_memos SET memo = NULL, detail = NULL, doomed = NULL WHERE seq = :seq
