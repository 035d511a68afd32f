--- flags: allow-oom
-- Store the number of partitions that a producer uses, if it is higher than the stored number. The stored number never
-- shrinks. The server runs this script at maxmemory, too, because the other partitions may be on nodes that have room.
-- KEYS  1 partitions   2 paused
-- ARGV  1 the number of partitions that the producer uses; 0 changes nothing
-- =>    the number that was stored before; us until the pause ends, or 0
--- include clock
--- include pause
local stored = redis.call('GET', KEYS[1]) or ''
local before = #stored < 10 and string.find(stored, '^%d+$') and tonumber(stored) or 1 -- any other value was written by another program
if tonumber(ARGV[1]) > before then redis.call('SET', KEYS[1], ARGV[1]) end
local pause = pause_end(KEYS[2]) - now
return { before, string.format('%.0f', math.max(pause, 0)) }
