--- flags: allow-oom
-- Store how many partitions a producer uses, if that is more than is stored: the number never shrinks.
-- Allowed at maxmemory: the other partitions may be on nodes that have room.
-- KEYS  1 partitions   2 paused
-- ARGV  1 how many the producer uses; 0 changes nothing
-- =>    how many were stored before, us until the pause ends or 0
--- include clock
--- include pause
local stored = redis.call('GET', KEYS[1]) or ''
local before = #stored < 10 and string.find(stored, '^%d+$') and tonumber(stored) or 1 -- anything else is not multiq's
if tonumber(ARGV[1]) > before then redis.call('SET', KEYS[1], ARGV[1]) end
local pause = pause_end(KEYS[2]) - now
return { before, string.format('%.0f', math.max(pause, 0)) }
