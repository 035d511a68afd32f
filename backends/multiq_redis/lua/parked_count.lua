--- flags: no-writes
-- Count the parked jobs.
-- KEYS  1 lines
-- =>    the number of parked jobs
return redis.call('ZCARD', KEYS[1])
