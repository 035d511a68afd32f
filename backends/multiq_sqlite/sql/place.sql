-- Puts ready jobs with gates into their lines, and frees the slots of jobs that are deleted or no longer reserved.
INSERT INTO temp.multiq_to_place SELECT value FROM json_each(:seqs)
