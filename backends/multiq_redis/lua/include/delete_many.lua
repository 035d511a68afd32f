-- `is_left_to_another_script` takes a job with gates out of its line, if the job is parked. The other script also deletes
-- what the limits of an empty queue have left, for example the slot of a lease that has ended.
local DROPPED_PER_KEEP = 2 -- expired outcomes that each new outcome deletes: more than one, so that their number falls
local seen = earlier_answer()
if seen then return seen end

local kept = ARGV[2]
local expires_at = kept ~= '' and now + unpacked('>I8', kept) or 0
local answers, count = {}, 0
for i = 3, #ARGV do
    local id = ARGV[i]
    local state, record, _, set = find(id, KEYS[2], KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[11])
    if not state then
        answers[i - 2] = 'm'
    elseif state == 'reserved' then
        answers[i - 2] = 'r'
    elseif has_gates(record) and is_left_to_another_script(id, record) then
        answers[i - 2] = 'g'
    else
        answers[i - 2] = 'd'
        if kept ~= '' then
            count = count + 1
            redis.call('HSET', KEYS[15], id, u64(now) .. u64(expires_at) .. sub(record, 29, 32) .. sub(kept, 9))
            redis.call('ZADD', KEYS[16], string.format('%.0f', expires_at), id)
        end
        redis.call('ZREM', set, place_of(id, record))
        redis.call('HDEL', KEYS[2], id)
        if state == 'held' then forget_terms(id, record) end
        if flags_of(record) > 0 then
            forget_unique(id, record, KEYS[3])
            redis.call('HDEL', KEYS[3], id, id .. '\1', id .. '\2')
            redis.call('HDEL', KEYS[4], id, id .. '\1')
        end
    end
end
if count > 0 then drop_expired(KEYS[15], KEYS[16], DROPPED_PER_KEEP * count) end
forget_if_empty(KEYS[2], KEYS[9], KEYS[10], KEYS[3], KEYS[4])
return remember(table.concat(answers))
