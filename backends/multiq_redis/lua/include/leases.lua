-- Counts leases at the gates of their jobs (include/open_gates.lua).
local RATES_DROPPED = 2 -- past times that each job with a rate deletes: more than one, so that their number falls
local new_slots, new_ends, changed_rates = {}, {}, {}
local first_end, last_end = math.huge, nil -- of the leases that this call counts: the earliest end; the end of the last one, as text

local function has_fair_gate(gates)
    for i = 1, #gates do
        if is_fair(gates[i]) then return true end
    end
    return false
end

open_gates = function(record)
    local gates = gates_of(record)
    if #gates == 0 then return gates end -- another program has cut the record
    if gated_left <= 0 or has_fair_gate(gates) or closed_one(gates) then return nil end
    return gates
end

-- *ends_at*: the lease's end, as text.
enter = function(gates, id, ends_at)
    if #gates == 0 then return end
    gated_left = gated_left - 1
    if ends_at ~= last_end then first_end, last_end = math.min(first_end, tonumber(ends_at)), ends_at end
    local size = #new_slots
    for i = 1, #gates do
        local gate = gates[i]
        local member = gate .. id
        new_slots[size + 1], new_slots[size + 2] = '0', member
        new_ends[size + 1], new_ends[size + 2] = ends_at, member
        size = size + 2
        local quota = quota_of(gate)
        if quota and quota.fair then leases_at(gate) end -- the set `slots` does not have this call's leases yet
        if used[gate] then used[gate] = used[gate] + 1 end
        if quota and quota.interval > 0 then
            arrivals[gate] = math.max(arrival_at(gate), now) + quota.interval
            changed_rates[gate] = true
        end
    end
end

local function write_leases()
    if #new_slots == 0 then return end
    redis.call('ZADD', key.slots, unpack(new_slots))
    redis.call('ZADD', key.slot_ends, unpack(new_ends))
    for gate in pairs(changed_rates) do
        redis.call('ZADD', key.rates, string.format('%.0f', arrivals[gate]), gate)
        local past = redis.call('ZRANGEBYSCORE', key.rates, '-inf', now, 'LIMIT', 0, RATES_DROPPED)
        if #past > 0 then redis.call('ZREM', key.rates, unpack(past)) end
    end
end
