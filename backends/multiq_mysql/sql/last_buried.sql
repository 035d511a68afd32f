-- The place behind all that are buried. The time would do if no clock ever stood still or went back.
SELECT GREATEST({now}, LEAST(9223372036854000000, COALESCE((
    SELECT place FROM multiq_jobs FORCE INDEX (multiq_jobs_place)
    WHERE queue = {queue} AND state = 3 ORDER BY place DESC LIMIT 1
), 0)) + 1)
