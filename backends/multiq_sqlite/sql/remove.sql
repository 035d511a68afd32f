-- Deletes jobs for acks, deletes and purges.
INSERT INTO temp.multiq_to_remove SELECT value FROM json_each(:seqs)
