-- The gates of leases that have ended.
SELECT DISTINCT queue, name, gate_key FROM multiq_leases FORCE INDEX (PRIMARY)
WHERE job IN ({seqs})
