-- Polls a queue without a lock. The result is one text, because PyMySQL needs more time for one column than the server needs
-- for the row. Each part reads one entry of the index, or is left out (scan_window.py). The poll looks only a short time
-- ahead, because the leases of acked jobs have left deleted entries at future times. A busy consumer asks only whether any
-- job is due. For this it scans backwards (DESC), from the present time into the past. Such a scan does not meet the deleted
-- entries at future times. If the queue may have limits, the part {opens} is the text of opens.sql. The last number is
-- the time that the statement took.
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
    {opens},
    TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)))
