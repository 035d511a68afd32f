--- flags: allow-oom
-- Delete a slice of the jobs of one state. Due jobs were promoted before. Never called for the reserved set.
-- KEYS  1 call   2 jobs   3 bodies   4 reasons   5 the state's set   6 sequence   7 hint
-- ARGV  1 number   2 how many at most
-- =>    how many
--- include record
--- include once
--- include empty
local seen = earlier_answer()
if seen then return seen end
local popped = redis.call('ZPOPMIN', KEYS[5], ARGV[2])
local ids = {}
for i = 1, #popped, 2 do ids[#ids + 1] = id_in(popped[i]) end
if #ids > 0 then
    redis.call('HDEL', KEYS[2], unpack(ids))
    redis.call('HDEL', KEYS[3], unpack(ids))
    redis.call('HDEL', KEYS[4], unpack(ids))
    forget_if_empty(KEYS[2], KEYS[6], KEYS[7])
end
return remember(tostring(#ids))
