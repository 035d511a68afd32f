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

-- The gates of the last job that could be handed out, and how many further jobs with the same gates can be handed out before
-- the gates must be looked at again. Often, all jobs of a call have the same gates.
local last_gates, room = nil, 0

open_gates = function(record, at)
    local gates = gates_of(record, at)
    if #gates == 0 then return gates end -- another program has cut the record
    if gates ~= last_gates or room <= 0 then
        if has_fair_gate(gates) or closed_one(gates) then return nil end
        last_gates, room = gates, math.huge
        for i = 1, #gates do
            local quota = quota_of(gates[i])
            if quota and quota.interval > 0 then
                room = 1
            elseif quota and quota.slots < ANY then
                room = math.min(room, quota.slots - leases_at(gates[i]))
            end
        end
    end
    if gated_left <= 0 then return nil end
    room = room - 1
    return gates
end

local has_rate = {} -- the gates of counted jobs -> whether one of these gates has a rate

-- *ends_at*: the lease's end, as text.
enter = function(gates, id, ends_at)
    if #gates == 0 then return end
    gated_left = gated_left - 1
    if ends_at ~= last_end then first_end, last_end = math.min(first_end, tonumber(ends_at)), ends_at end
    local size, reads_quotas, rated = #new_slots, has_rate[gates] ~= false, false
    for i = 1, #gates do
        local gate = gates[i]
        local member = gate .. id
        new_slots[size + 1], new_slots[size + 2] = '0', member
        new_ends[size + 1], new_ends[size + 2] = ends_at, member
        size = size + 2
        if reads_quotas then
            local quota = quota_of(gate)
            if quota and quota.fair then leases_at(gate) end -- the set `slots` does not have this call's leases yet
            if quota and quota.interval > 0 then
                arrivals[gate] = math.max(arrival_at(gate), now) + quota.interval
                changed_rates[gate], rated = true, true
            end
        end
        local count = used[gate]
        if count then used[gate] = count + 1 end
    end
    if reads_quotas then has_rate[gates] = rated end
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
