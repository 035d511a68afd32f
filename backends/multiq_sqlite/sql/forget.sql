-- Deletes expired outcomes, or the outcomes of given jobs.
INSERT INTO temp.multiq_to_forget SELECT value FROM json_each(:seqs)
