--- flags: allow-oom
-- Pause a queue: no job of the queue is reserved for the given time. A time of zero ends the pause.
-- KEYS  1 call   2 paused   3 hint   4 jobs
-- ARGV  1 the call's number   2 the length of the pause, us
-- =>    ok
--- include record
--- include once
if earlier_answer() then return 'ok' end
--- include clock
--- include notify
local pause = tonumber(ARGV[2])
redis.call('DEL', KEYS[2])
if pause > 0 then
    -- the key must not expire before the pause ends, and Redis counts the time of expiry in whole milliseconds
    local lifetime = string.format('%.0f', math.ceil(pause / 1000) + 2)
    redis.call('SET', KEYS[2], string.format('%.0f', now + pause), 'PX', lifetime)
end
if redis.call('EXISTS', KEYS[4]) == 1 then notify(KEYS[3]) end -- an empty queue keeps no marker
return remember('ok')
