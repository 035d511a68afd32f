INSERT INTO temp.multiq_to_touch SELECT value, :now FROM json_each(:seqs)
