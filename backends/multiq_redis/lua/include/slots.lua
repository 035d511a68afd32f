-- Counts leases at the gates of their jobs (include/open_gates.lua, include/slot_entries.lua).
local RATES_DROPPED = 2 -- past times that each job with a rate deletes: more than one, so that their number falls
local new_leases, first_ends, changed_rates = {}, {}, {} -- gate -> the ids of the jobs; gate -> the first end; gates
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
    local reads_quotas, rated = has_rate[gates] ~= false, false
    for i = 1, #gates do
        local gate = gates[i]
        local ids, before = new_leases[gate], first_ends[gate]
        if not ids then
            new_leases[gate], first_ends[gate] = { id }, ends_at
        else
            ids[#ids + 1] = id
            if ends_at ~= before and tonumber(ends_at) < tonumber(before) then first_ends[gate] = ends_at end
        end
        if reads_quotas then
            local quota = quota_of(gate)
            if quota and quota.fair then leases_at(gate) end -- the stored number does not have this call's leases yet
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

-- Returns nothing, or the groups if they must be joined with groups that are there, and the numbers must be counted again.
local function write_leases()
    if not last_end then return end
    local ends, groups, changes = {}, {}, {}
    for gate, ids in pairs(new_leases) do
        local entry = gate .. (#ids == 1 and ids[1] or token)
        ends[#ends + 1], ends[#ends + 2] = first_ends[gate], entry
        changes[gate] = #ids
        if #ids > 1 then
            changes[entry] = #ids
            groups[#groups + 1], groups[#groups + 2] = entry, cmsgpack.pack(ids)
        end
    end
    local is_right = 2 * redis.call('ZADD', key.slot_ends, unpack(ends)) == #ends
    if is_right and #groups > 0 then redis.call('HSET', key.slot_ids, unpack(groups)) end
    is_right = change_numbers(changes) and is_right
    for gate in pairs(changed_rates) do
        redis.call('ZADD', key.rates, string.format('%.0f', arrivals[gate]), gate)
        local past = redis.call('ZRANGEBYSCORE', key.rates, '-inf', now, 'LIMIT', 0, RATES_DROPPED)
        if #past > 0 then redis.call('ZREM', key.rates, unpack(past)) end
    end
    return not is_right and groups or nil
end
