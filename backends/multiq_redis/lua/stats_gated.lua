--- flags: no-writes
-- Like stats.lua, but for queues that may have parked jobs, which count as ready. One script counts all jobs, because a job
-- may be parked or handed out between two scripts.
-- KEYS  1 ready   2 delayed   3 reserved   4 buried   5 paused   6 partitions   7 held   8 lines
-- =>    the reply of stats.lua
--- include clock
--- include pause
local parked = redis.call('ZCARD', KEYS[8])
--- include stats
