--- flags: no-writes
-- For each of some jobs, return the closed gate at which the job is parked.
-- KEYS  1 parked   2 limits   3 slot_counts   4 rates   5 jobs   6 slot_ends   7 slot_ids   8 reserved
-- ARGV  the jobs' ids
-- =>    for each job: the packed gate, or nothing
--- include record
--- include clock
--- include key_and_gates
local key = {
    parked = KEYS[1], limits = KEYS[2], slot_counts = KEYS[3], rates = KEYS[4], jobs = KEYS[5], slot_ids = KEYS[7],
    reserved = KEYS[8],
}
--- include open_gates
--- include slot_entries
--- include live_slots
--- include ended_slots
for gate, number in pairs(ended_leases(KEYS[6])) do used[gate] = leases_at(gate) - number end
local reply = {}
for i = 1, #ARGV do
    local line = redis.call('HGET', key.parked, ARGV[i])
    local record = line and redis.call('HGET', KEYS[5], ARGV[i])
    reply[i] = record and (closed_one({ line }) or closed_one(gates_of(record))) or ''
end
return reply
