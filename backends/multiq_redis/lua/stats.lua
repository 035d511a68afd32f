--- flags: no-writes
-- Count the jobs by state. If a job's due time has passed or its lease has ended, it counts as ready.
-- KEYS  1 ready   2 delayed   3 reserved   4 buried   5 paused   6 partitions   7 held
-- =>    ready, delayed, reserved, buried, us until the pause ends or 0,
--       the number of partitions of the queue, or nothing if it is not stored; held; and 1 if jobs may be parked, else 0
--- include clock
--- include pause
local parked = 0
--- include stats
