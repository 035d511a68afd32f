--- flags: allow-oom
-- Like kick.lua, but for queues with jobs that have unique keys. If another job has taken the key of a buried job, the
-- buried job stays buried.
-- KEYS  1 call   2 jobs   3 ready   4 buried   5 hint   6 bodies   7 reasons   8 unreadable   9 unique_holds
-- ARGV  1 the call's number   2 the maximum number of jobs   3 the score after which to begin
-- =>    the number of jobs, a colon, and the score after which to go on, or nothing if no more jobs are buried
--- include record
--- include once
--- include clock
--- include unreadable
--- include notify
--- include key_and_gates
local key = { jobs = KEYS[2], buried = KEYS[4], bodies = KEYS[6], unique_holds = KEYS[9] }
--- include unique
local SLICE = 500
local seen = earlier_answer()
if seen then return seen end
local found = redis.call('ZRANGEBYSCORE', KEYS[4], '(' .. ARGV[3], '+inf', 'WITHSCORES', 'LIMIT', 0, SLICE)
local kicked, at, limit = 0, 1, tonumber(ARGV[2])
while at < #found and kicked < limit do
    local place = found[at]
    local id = id_in(place)
    local record = redis.call('HGET', KEYS[2], id)
    local fault = fault_of(place, record)
    if fault or not record then
        redis.call('ZREM', KEYS[4], place)
        if fault then set_aside(place, record, fault, KEYS[2], KEYS[6], KEYS[7], KEYS[8]) end
    else
        local unique_key = unique_of(record)
        if not unique_key or take_again(id, unique_key) then
            redis.call('ZREM', KEYS[4], place)
            redis.call('HSET', KEYS[2], id, sub(record, 1, 36) .. u32(count_at(record, 37) + 1) .. sub(record, 41))
            redis.call('ZADD', KEYS[3], priority_in(place), place)
            kicked = kicked + 1
        end
    end
    at = at + 2
end
if kicked > 0 then notify(KEYS[5]) end
local is_over = at > #found and #found < 2 * SLICE
return remember(kicked .. ':' .. (is_over and '' or found[at - 1]))
