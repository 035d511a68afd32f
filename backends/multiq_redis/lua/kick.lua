--- flags: allow-oom
-- Make the jobs ready that have been buried for the longest time.
-- KEYS  1 call   2 jobs   3 ready   4 buried   5 hint   6 bodies   7 reasons   8 unreadable
-- ARGV  1 the call's number   2 the maximum number of jobs
-- =>    the number of jobs; with a minus sign if a job with a unique key is next: see kick_unique.lua
--- include record
--- include once
--- include unreadable
--- include key_and_gates
--- include notify
local seen = earlier_answer()
if seen then return seen end
local popped = redis.call('ZPOPMIN', KEYS[4], ARGV[2])
for i = 1, #popped, 2 do
    local place = popped[i]
    local id = id_in(place)
    local record = redis.call('HGET', KEYS[2], id)
    local fault = fault_of(place, record)
    if fault then
        set_aside(place, record, fault, KEYS[2], KEYS[6], KEYS[7], KEYS[8])
    elseif record and unique_of(record) then
        for left = i, #popped, 2 do redis.call('ZADD', KEYS[4], popped[left + 1], popped[left]) end
        if i > 1 then notify(KEYS[5]) end
        return remember('-' .. (i - 1) / 2)
    elseif record then
        record = sub(record, 1, 36) .. u32(count_at(record, 37) + 1) .. sub(record, 41)
        redis.call('HSET', KEYS[2], id, record)
        redis.call('ZADD', KEYS[3], priority_in(place), place)
    end
end
if #popped > 0 then notify(KEYS[5]) end
return remember(tostring(#popped / 2))
