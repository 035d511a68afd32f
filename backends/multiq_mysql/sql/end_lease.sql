-- Deletes the rows of one gate's leases that have ended. remove.sql explains the form and the last condition.
DELETE leased FROM multiq_leases AS leased FORCE INDEX (PRIMARY)
WHERE job IN ({seqs}) AND name = {name} AND gate_key = {key} AND token >= 0
