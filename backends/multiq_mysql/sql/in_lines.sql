-- The line of each of these jobs.
SELECT job, name, gate_key FROM multiq_lines FORCE INDEX (multiq_lines_job) WHERE job IN ({seqs})
