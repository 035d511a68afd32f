--- flags: allow-oom
-- Make one buried or delayed job ready now; a ready one stays as it is.
-- KEYS  1 call   2 jobs   3 ready   4 delayed   5 reserved   6 buried   7 hint
-- ARGV  1 number   2 id
-- =>    ok, missing, or reserved: a lease holds it
--- include record
--- include once
--- include clock
--- include notify
--- include find
local seen = earlier_answer()
if seen then return seen end
local id = ARGV[2]
local state, record, _, set = find(id, KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
if not state then return remember('missing') end
if state == 'reserved' then return remember('reserved') end
if state == 'ready' then return remember('ok') end
local place = place_of(id, record)
redis.call('ZREM', set, place)
if state == 'buried' then
    redis.call('HSET', KEYS[2], id, sub(record, 1, 36) .. u32(count_at(record, 37) + 1) .. sub(record, 41))
end
redis.call('ZADD', KEYS[3], priority_in(place), place)
notify(KEYS[7])
return remember('ok')
