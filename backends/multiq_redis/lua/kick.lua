--- flags: allow-oom
-- Make the longest buried jobs ready.
-- KEYS  1 call   2 jobs   3 ready   4 buried   5 hint   6 bodies   7 reasons   8 unreadable
-- ARGV  1 number   2 how many at most
-- =>    how many
--- include record
--- include once
--- include validate
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
    elseif record then
        record = sub(record, 1, 36) .. u32(count_at(record, 37) + 1) .. sub(record, 41)
        redis.call('HSET', KEYS[2], id, record)
        redis.call('ZADD', KEYS[3], priority_in(place), place)
    end
end
if #popped > 0 then notify(KEYS[5]) end
return remember(tostring(#popped / 2))
