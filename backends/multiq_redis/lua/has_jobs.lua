--- flags: no-writes
-- Find out whether there are jobs to hand out in the given partitions. All given partitions are on one server.
-- KEYS  1 ready   2 delayed   3 reserved   4 paused   5 partitions
--       and so on for each partition
-- =>    now, the number of partitions of the first queue, or nothing if it is not stored
--       then for each partition: 1 if something is ready or due, else 0
--       and the time at which the next delay, lease or pause ends, which may change this (us; nothing: never)
--- include clock
--- include pause
local function first_at(set)
    local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
    local at = first[2] and tonumber(first[2])
    return at and at < math.huge and at or nil -- only another program writes an infinite score
end

local reply = { string.format('%.0f', now), redis.call('GET', KEYS[5]) or '' }
for at = 0, #KEYS - 1, 5 do
    local paused = pause_end(KEYS[at + 4])
    local due_at, ends_at = first_at(KEYS[at + 2]), first_at(KEYS[at + 3])
    local change_at = due_at and ends_at and math.min(due_at, ends_at) or due_at or ends_at
    local is_due = redis.call('EXISTS', KEYS[at + 1]) == 1 or (change_at and change_at <= now)
    if paused > now then is_due, change_at = false, paused end
    reply[#reply + 1] = is_due and '1' or '0'
    reply[#reply + 1] = change_at and not is_due and string.format('%.0f', change_at) or ''
end
return reply
