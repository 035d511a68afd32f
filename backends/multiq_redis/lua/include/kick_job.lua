-- `refusal_of` says why a buried job may not be kicked, or returns nil.
local seen = earlier_answer()
if seen then return seen end
local id = ARGV[2]
local state, record, _, set = find(id, KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[8])
if not state then return remember('missing') end
if state == 'reserved' then return remember('reserved') end
if state == 'ready' then return remember('ok') end
local refusal = state == 'buried' and refusal_of(id, record)
if refusal then return refusal end
local place = place_of(id, record)
redis.call('ZREM', set, place)
if state == 'buried' then
    redis.call('HSET', KEYS[2], id, sub(record, 1, 36) .. u32(count_at(record, 37) + 1) .. sub(record, 41))
end
if state == 'held' then forget_terms(id, record) end
redis.call('ZADD', KEYS[3], priority_in(place), place)
notify(KEYS[7])
return remember('ok')
