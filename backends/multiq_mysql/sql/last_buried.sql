-- A value for the column place that is greater than the place of every buried job. The time alone would not be enough,
-- because a clock may stand still or go back.
SELECT GREATEST({now}, LEAST(9223372036854000000, COALESCE((
    SELECT place FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
    WHERE queue = {queue} AND state = 3 ORDER BY place DESC LIMIT 1
), 0)) + 1)
