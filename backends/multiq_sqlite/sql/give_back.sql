INSERT INTO temp.multiq_to_give_back SELECT value, :state, :due_at FROM json_each(:seqs)
