-- Stores a memo and a detail with a job. If the new memo is NULL, the stored memo stays. The new detail replaces the stored
-- detail, even if the new one is NULL. If keeps_detail is 1, the stored detail stays.
INSERT INTO temp.multiq_to_note VALUES (:seq, :memo, :detail, :keeps_detail)
