-- Counts ranges of the index, and does not read the jobs' rows. Due jobs count as ready, even if they are not promoted yet.
SELECT
    (SELECT COUNT(*) FROM multiq_jobs FORCE INDEX (multiq_jobs_place) WHERE queue = {queue} AND state = 0)
    + (SELECT COUNT(*) FROM multiq_jobs FORCE INDEX (multiq_jobs_place) WHERE queue = {queue} AND state = 4)
    + (SELECT COUNT(*) FROM multiq_jobs FORCE INDEX (multiq_jobs_place) WHERE queue = {queue} AND state = 6)
    + (SELECT COUNT(*) FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
       WHERE queue = {queue} AND state = 1 AND place <= {now})
    + (SELECT COUNT(*) FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
       WHERE queue = {queue} AND state = 2 AND place <= {now}),
    (SELECT COUNT(*) FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
     WHERE queue = {queue} AND state = 1 AND place > {now}),
    (SELECT COUNT(*) FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
     WHERE queue = {queue} AND state = 2 AND place > {now}),
    (SELECT COUNT(*) FROM multiq_jobs FORCE INDEX (multiq_jobs_place) WHERE queue = {queue} AND state = 3),
    (SELECT COUNT(*) FROM multiq_jobs FORCE INDEX (multiq_jobs_place) WHERE queue = {queue} AND state = 5),
    (SELECT paused_until FROM multiq_queues WHERE queue = {queue}) - {now}
