-- What a queue has to offer, without a lock, in one text: PyMySQL takes longer for a column than the server for the row.
-- Each part reads one entry of the index, or is left out (scan_window.py). No further ahead than matters, because the leases
-- of jobs that were acked have left entries in the times to come. A busy consumer asks only whether anything is due, and
-- backwards (DESC): if nothing is, the scan ends at the ready jobs, and not behind all those entries. Last, how long
-- all that took.
SELECT CONCAT_WS(' ', {number}, {now},
    COALESCE((SELECT GREATEST(paused_until, 0) FROM multiq_queues WHERE queue = {queue}), 0) - {now},
    EXISTS (SELECT 1 FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
            WHERE queue = {queue} AND state = 4 AND {again})
    OR EXISTS (SELECT 1 FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
               WHERE queue = {queue} AND state = 0 AND {ready}),
    COALESCE((SELECT GREATEST(place, 0) FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
              WHERE queue = {queue} AND state = 1 AND place <= {now} + {horizon} AND {due}
              ORDER BY place {order} LIMIT 1) - {now}, '-'),
    COALESCE((SELECT GREATEST(place, 0) FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
              WHERE queue = {queue} AND state = 2 AND place <= {now} + {horizon} AND {due}
              ORDER BY place {order} LIMIT 1) - {now}, '-'),
    TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)))
