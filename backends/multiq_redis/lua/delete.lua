--- flags: allow-oom
-- Delete a job that is not reserved.
-- KEYS  1 call   2 jobs   3 bodies   4 reasons   5 ready   6 delayed   7 reserved   8 buried   9 sequence
--       10 hint
-- ARGV  1 number   2 id
-- =>    ok, missing, or reserved: a lease holds it
--- include record
--- include once
--- include clock
--- include find
--- include empty
local seen = earlier_answer()
if seen then return seen end
local state, record, _, set = find(ARGV[2], KEYS[2], KEYS[5], KEYS[6], KEYS[7], KEYS[8])
if not state then return remember('missing') end
if state == 'reserved' then return remember('reserved') end
redis.call('ZREM', set, place_of(ARGV[2], record))
redis.call('HDEL', KEYS[2], ARGV[2])
if flags_of(record) > 0 then
    redis.call('HDEL', KEYS[3], ARGV[2])
    redis.call('HDEL', KEYS[4], ARGV[2])
end
forget_if_empty(KEYS[2], KEYS[9], KEYS[10])
return remember('ok')
