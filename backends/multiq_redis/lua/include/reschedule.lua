-- `refusal_of` says why a job may not be rescheduled, or returns nil.
local seen = earlier_answer()
if seen then return seen end
local id, delay = ARGV[2], tonumber(ARGV[3])
local state, record, _, set = find(id, KEYS[2], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[11])
if not state then return remember('missing') end
if state == 'reserved' or state == 'held' then return remember(state) end
local refusal = refusal_of(id, record)
if refusal then return refusal end
redis.call('ZREM', set, place_of(id, record))
local flags = flags_of(record)
if flags >= 2 then redis.call('HDEL', KEYS[3], id, id .. '\1') end
if flags >= 128 then redis.call('HDEL', KEYS[10], id .. '\1', id .. '\2') end
record = u64(redis.call('INCR', KEYS[8])) .. u64(now) .. sub(record, 17, 28) .. string.rep('\0', 12)
    .. string.char(flags % 2) .. NO_HOLDER .. sub(record, 54)
redis.call('HSET', KEYS[2], id, record)
local place = place_of(id, record)
if delay > 0 then
    redis.call('ZADD', KEYS[5], now + delay, place)
    notify_if_first(KEYS[9], KEYS[5], now + delay)
else
    redis.call('ZADD', KEYS[4], priority_in(place), place)
    notify(KEYS[9])
end
return remember('ok')
