--- flags: no-writes
-- Read one job.
-- KEYS  1 jobs   2 bodies   3 reasons   4 ready   5 delayed   6 reserved   7 buried   8 held
--       9 terms
-- ARGV  1 id
-- =>    nothing if there is no job with this id, else: now, state, score (of a held job: how many arrivals it waits for),
--       abandoned (1 if its lease has ended and it was not promoted yet),
--       record, body or nothing, reason or nothing, and of a job with extras its memo and its detail, each or nothing
--- include record
--- include clock
--- include find
local state, record, at, set = find(ARGV[1], KEYS[1], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8])
if not state then return false end
if state == 'held' then at = tostring(count_at(redis.call('HGET', KEYS[9], ARGV[1]) or '\0\0\0\0', 1)) end
local abandoned = state == 'ready' and set == KEYS[6]
local flags = flags_of(record)
local reply = {
    string.format('%.0f', now),
    state,
    at,
    abandoned and '1' or '0',
    record,
    flags % 2 == 1 and redis.call('HGET', KEYS[2], ARGV[1]) or '',
    flags >= 2 and redis.call('HGET', KEYS[3], ARGV[1]),
}
if flags >= 128 then
    reply[8] = redis.call('HGET', KEYS[2], ARGV[1] .. '\1')
    reply[9] = redis.call('HGET', KEYS[3], ARGV[1] .. '\1')
end
return reply
