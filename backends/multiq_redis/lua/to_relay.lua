--- flags: no-writes
-- Find out for each of the given partitions whether outbox.lua has something to do. All given partitions are on one server.
-- KEYS  1 outbox   2 seen   3 litter   4 partitions
--       and so on for each partition
-- =>    for each partition: 1 or 0, and the number of partitions of its queue, or nothing if it is not stored
--- include clock
local reply = {}
for at = 0, #KEYS - 1, 4 do
    local first = redis.call('ZRANGE', KEYS[at + 2], 0, 0, 'WITHSCORES')
    local has_expired = first[2] and tonumber(first[2]) <= now
    local is_needed = has_expired or redis.call('EXISTS', KEYS[at + 1], KEYS[at + 3]) > 0
    reply[#reply + 1] = is_needed and '1' or '0'
    reply[#reply + 1] = redis.call('GET', KEYS[at + 4]) or ''
end
return reply
