INSERT INTO temp.multiq_to_promote SELECT value FROM json_each(:seqs)
