INSERT INTO temp.multiq_to_kick SELECT value FROM json_each(:seqs)
