--- flags: no-writes
-- Count the jobs by state. A job past its due time or its lease counts as ready.
-- KEYS  1 ready   2 delayed   3 reserved   4 buried   5 paused   6 partitions
-- =>    ready, delayed, reserved, buried, us until the pause ends or 0,
--       how many partitions the queue has, or nothing if that is not stored
--- include clock
--- include pause
local due = redis.call('ZCOUNT', KEYS[2], '-inf', now)
local abandoned = redis.call('ZCOUNT', KEYS[3], '-inf', now)
local pause = pause_end(KEYS[5]) - now
return {
    redis.call('ZCARD', KEYS[1]) + due + abandoned,
    redis.call('ZCARD', KEYS[2]) - due,
    redis.call('ZCARD', KEYS[3]) - abandoned,
    redis.call('ZCARD', KEYS[4]),
    string.format('%.0f', math.max(pause, 0)),
    redis.call('GET', KEYS[6]) or '',
}
