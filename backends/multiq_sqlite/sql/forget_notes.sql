INSERT INTO temp.multiq_to_forget_notes SELECT value FROM json_each(:seqs)
