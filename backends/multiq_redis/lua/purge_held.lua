--- flags: allow-oom
-- Delete a slice of the held jobs.
-- KEYS  1 call   2 jobs   3 bodies   4 reasons   5 held   6 sequence   7 hint   8 terms   9 arrived   10 litter
-- ARGV  1 the call's number   2 the maximum number of jobs
-- =>    the number of jobs
--- include record
--- include once
--- include empty
--- include key_and_gates
local key = { terms = KEYS[8], arrived = KEYS[9], litter = KEYS[10] }
--- include holds
local seen = earlier_answer()
if seen then return seen end
local popped = redis.call('ZPOPMIN', KEYS[5], ARGV[2])
for i = 1, #popped, 2 do
    local id = id_in(popped[i])
    local record = redis.call('HGET', KEYS[2], id)
    -- otherwise an older multiq has deleted the job, or has made it ready with another place
    if record and place_of(id, record) == popped[i] then
        forget_terms(id, record)
        redis.call('HDEL', KEYS[2], id)
        redis.call('HDEL', KEYS[3], id)
        forget_unique(id, record, KEYS[3])
    end
end
if #popped > 0 then forget_if_empty(KEYS[2], KEYS[6], KEYS[7], KEYS[3], KEYS[4]) end
return remember(tostring(#popped / 2))
