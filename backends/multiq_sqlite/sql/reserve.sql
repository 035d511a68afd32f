-- Reserves the jobs that ready.sql has found in the same transaction, under leases of one token.
INSERT INTO temp.multiq_to_reserve SELECT value, :token, :now FROM json_each(:seqs)
