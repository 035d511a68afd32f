--- flags: allow-oom
-- Delete the outcomes of the given jobs, or delete outcomes that have expired.
-- KEYS  1 call   2 outcomes   3 expiring
-- ARGV  1 the call's number   2 the maximum number of expired outcomes, or nothing: the outcomes of the following jobs
--       then the jobs' ids, each once
-- =>    the number of deleted outcomes; if an outcome of one of the jobs had expired, it is deleted but not counted
local sub = string.sub
--- include once
--- include clock
--- include outcomes
local seen = earlier_answer()
if seen then return seen end
if ARGV[2] ~= '' then return remember(tostring(drop_expired(KEYS[2], KEYS[3], tonumber(ARGV[2])))) end
local ids, count = {}, 0
for i = 3, #ARGV do
    ids[i - 2] = ARGV[i]
    local expires_at = redis.call('ZSCORE', KEYS[3], ARGV[i])
    if expires_at and tonumber(expires_at) > now then count = count + 1 end
end
redis.call('ZREM', KEYS[3], unpack(ids))
redis.call('HDEL', KEYS[2], unpack(ids))
return remember(tostring(count))
