--- flags: no-writes
-- For each of some jobs, return the closed gate at which the job is parked.
-- KEYS  1 parked   2 limits   3 slots   4 rates   5 jobs   6 slot_ends
-- ARGV  the jobs' ids
-- =>    for each job: the packed gate, or nothing
--- include record
--- include clock
--- include keyed
local key = { parked = KEYS[1], limits = KEYS[2], slots = KEYS[3], rates = KEYS[4] }
--- include open_gates
local MOST_ENDED = 10000 -- ended leases, in some milliseconds
-- The next reserve deletes the entries of leases that have ended.
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[6], '-inf', now, 'LIMIT', 0, MOST_ENDED)) do
    local size = 2 + unpacked('>I2', member)
    local gate = sub(member, 1, size + 2 + unpacked('>I2', member, size + 1))
    used[gate] = leases_at(gate) - 1
end
local reply = {}
for i = 1, #ARGV do
    local line = redis.call('HGET', key.parked, ARGV[i])
    local record = line and redis.call('HGET', KEYS[5], ARGV[i])
    reply[i] = record and (closed_one({ line }) or closed_one(gates_of(record))) or ''
end
return reply
