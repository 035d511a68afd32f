-- For acks, deletes and purges: the job is gone.
INSERT INTO temp.multiq_to_remove SELECT value FROM json_each(:seqs)
