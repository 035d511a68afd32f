-- Polls a queue without a lock. The result is one text, because PyMySQL takes longer for a column than the server for
-- the row. Each part reads one entry of the index, or is left out (scan_window.py). The look-ahead is short, because the
-- leases of acked jobs have left deleted entries at future times. A busy consumer only asks whether any job is due, and
-- scans backwards (DESC). If no job is due, a backward scan does not step over the deleted entries at future times. The
-- last number is the time that the statement took.
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
