-- Like others.sql, but for jobs whose rows are next to each other. It reads all rows between the first and the last one, in
-- the order in which they are stored, and so takes less than half as long for each.
SELECT seq, gates FROM multiq_jobs FORCE INDEX (PRIMARY)
WHERE seq > {seq} AND seq <= {end}
    AND gates NOT IN ({known}) AND queue = {queue} AND state IN (0, 4) AND place = {place}
ORDER BY seq
LIMIT {limit}
