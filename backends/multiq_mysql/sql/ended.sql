-- Locks jobs whose leases have ended. The locks are kept until the slots are taken, so that no touch renews these leases
-- meanwhile. Leaves out jobs that another session has locked, because that session may be touching them.
SELECT seq, state = 2 AND place > {now} FROM multiq_jobs FORCE INDEX (PRIMARY)
WHERE seq IN ({seqs})
ORDER BY seq
FOR UPDATE SKIP LOCKED
