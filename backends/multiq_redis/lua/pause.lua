--- flags: allow-oom
-- No new reservations for a while. Zero ends a pause.
-- KEYS  1 call   2 paused   3 hint   4 jobs
-- ARGV  1 number   2 us
-- =>    ok
--- include record
--- include once
if earlier_answer() then return 'ok' end
--- include clock
--- include notify
local pause = tonumber(ARGV[2])
redis.call('DEL', KEYS[2])
if pause > 0 then
    -- the key expires, but not early: expiry counts in whole milliseconds
    local lifetime = string.format('%.0f', math.ceil(pause / 1000) + 2)
    redis.call('SET', KEYS[2], string.format('%.0f', now + pause), 'PX', lifetime)
end
if redis.call('EXISTS', KEYS[4]) == 1 then notify(KEYS[3]) end -- an empty queue keeps no marker
return remember('ok')
