--- flags: allow-oom
-- Over how many lines a queue goes, after whoever calls has said how many he uses. It never gets fewer.
-- Allowed at maxmemory: the other lines may be on nodes that have room.
-- KEYS  1 partitions   2 paused
-- ARGV  1 how many he uses; 0 changes nothing
-- =>    over how many it went before, us that its pause goes on or 0
--- include clock
--- include pause
local stored = redis.call('GET', KEYS[1]) or ''
local before = #stored < 10 and string.find(stored, '^%d+$') and tonumber(stored) or 1 -- what else stands there is not multiq's
if tonumber(ARGV[1]) > before then redis.call('SET', KEYS[1], ARGV[1]) end
local pause = pause_end(KEYS[2]) - now
return { before, string.format('%.0f', math.max(pause, 0)) }
