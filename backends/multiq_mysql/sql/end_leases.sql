-- Deletes the rows of leases. remove.sql explains the form. Each job is compared with its own token: a job that was reserved
-- again has another lease, and jobs that were reserved by one call have the same token.
DELETE leased FROM multiq_leases AS leased FORCE INDEX (PRIMARY)
WHERE job IN ({seqs}) AND (job, token) IN ({leases})
