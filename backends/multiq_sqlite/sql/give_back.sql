INSERT INTO temp.multiq_to_give_back SELECT value FROM json_each(:seqs)
