--- flags: allow-oom
-- Delete a slice of the jobs of one state. The driver promotes due jobs before it calls this script. It never calls this
-- script for the reserved set or the held set.
-- KEYS  1 call   2 jobs   3 bodies   4 reasons   5 the state's set   6 sequence   7 hint
-- ARGV  1 the call's number   2 the maximum number of jobs
-- =>    the number of jobs; with a minus before it if one of these jobs had gates
--- include record
--- include once
--- include empty
--- include key_and_gates
-- Deletes the jobs' fields in the bodies hash and in the reasons hash. Most queues have neither hash.
local function forget_beside(hash, ids)
    if redis.call('EXISTS', hash) == 0 then return end
    local extras = {}
    for i = 1, #ids do
        extras[2 * i - 1], extras[2 * i] = ids[i] .. '\1', ids[i] .. '\2'
    end
    redis.call('HDEL', hash, unpack(ids))
    redis.call('HDEL', hash, unpack(extras))
end

-- Forgets that the jobs took their unique keys. Returns whether a job has gates. Only jobs with a field in the bodies hash
-- have a key or gates.
local function forget_unique_keys(ids)
    if redis.call('EXISTS', KEYS[3]) == 0 then return false end
    local records, is_any_gated = redis.call('HMGET', KEYS[2], unpack(ids)), false
    for i = 1, #ids do
        if records[i] then
            forget_unique(ids[i], records[i], KEYS[3])
            is_any_gated = is_any_gated or has_gates(records[i])
        end
    end
    return is_any_gated
end

local seen = earlier_answer()
if seen then return seen end
local MARKER = string.rep('\0', 12) .. '\128' .. string.rep('\0', 16) -- the marker of include/parked.lua, which is not a job
local marker_at = redis.call('ZSCORE', KEYS[5], MARKER)
if marker_at then redis.call('ZREM', KEYS[5], MARKER) end
local popped = redis.call('ZPOPMIN', KEYS[5], ARGV[2])
if marker_at then redis.call('ZADD', KEYS[5], marker_at, MARKER) end
local ids, is_any_gated = {}, false
for i = 1, #popped, 2 do ids[#ids + 1] = id_in(popped[i]) end
if #ids > 0 then
    is_any_gated = forget_unique_keys(ids)
    redis.call('HDEL', KEYS[2], unpack(ids))
    forget_beside(KEYS[3], ids)
    forget_beside(KEYS[4], ids)
    forget_if_empty(KEYS[2], KEYS[6], KEYS[7], KEYS[3], KEYS[4])
end
return remember((is_any_gated and '-' or '') .. #ids)
