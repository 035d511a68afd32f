-- `is_left_to_another_script` takes a job with gates out of its line, if the job is parked. The other script also deletes
-- what the limits of an empty queue have left, for example the slot of a lease that has ended.
local seen = earlier_answer()
if seen then return seen end
local state, record, _, set = find(ARGV[2], KEYS[2], KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[11])
if not state then return remember('missing') end
if state == 'reserved' then return remember('reserved') end
if has_gates(record) and is_left_to_another_script(ARGV[2], record) then return 'gated' end
redis.call('ZREM', set, place_of(ARGV[2], record))
redis.call('HDEL', KEYS[2], ARGV[2])
if state == 'held' then forget_terms(ARGV[2], record) end
if flags_of(record) > 0 then
    forget_unique(ARGV[2], record, KEYS[3])
    redis.call('HDEL', KEYS[3], ARGV[2], ARGV[2] .. '\1', ARGV[2] .. '\2')
    redis.call('HDEL', KEYS[4], ARGV[2], ARGV[2] .. '\1')
end
forget_if_empty(KEYS[2], KEYS[9], KEYS[10], KEYS[3], KEYS[4])
return remember('ok')
