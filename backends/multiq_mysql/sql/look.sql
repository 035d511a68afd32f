-- What a queue has to offer, without a lock, in one text: PyMySQL takes longer for a column than the server for the row.
-- Each part reads one entry of the index, from a floor on below which there are only entries that were deleted and not
-- purged yet.
SELECT CONCAT_WS(' ', {number}, {now},
    COALESCE((SELECT paused_until FROM multiq_queues WHERE queue = {queue}), 0) - {now},
    EXISTS (SELECT 1 FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
            WHERE queue = {queue} AND state = 4)
    OR EXISTS (SELECT 1 FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
               WHERE queue = {queue} AND state = 0 AND {ready_floor}),
    COALESCE((SELECT place FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
              WHERE queue = {queue} AND state = 1 AND place >= {delayed_floor}
              ORDER BY place LIMIT 1) - {now}, '-'),
    COALESCE((SELECT place FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
              WHERE queue = {queue} AND state = 2 AND place >= {reserved_floor}
              ORDER BY place LIMIT 1) - {now}, '-'))
