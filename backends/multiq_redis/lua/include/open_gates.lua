-- Which gates are open. The table `key` maps names to keys. A gate is packed as in a job's record. So no packed gate
-- is the beginning of another one.
-- limits: hash, name -> packed: slots (4 bytes, 0xFFFFFFFF: any number), us between two jobs (8 bytes, 0: no rate), burst
--   (4 bytes), 1 byte: f fair or -, 1 byte: p pinned or -, and what the driver stored with it
-- slot_counts, slot_ends, slot_ids: the live leases of each gate (include/slot_entries.lua)
-- rates: set of gates; the score is the time at which a job would be due at the steady rate (GCRA's theoretical arrival
--   time)
-- openings: set of gates; the score is the time from which on the next reserve checks whether the gate is open
--   After a limit's quota has changed, the set also has members for this limit: the limit, byte 0xFF, and l for its
--   lines or b for its blocking gates. If reserves have looked at some lines or gates, the last of these follows
local ANY = 4294967295
local AFTER = string.rep('\255', 17) -- sorts after any text that follows a gate in a member

local quotas, quotas_by_gate = {}, {} -- false: the limit is not stored
local used, arrivals = {}, {} -- gate -> live leases; gate -> the rate's time
local gates_by_terms = {}

local function limit_of(gate) return sub(gate, 1, 2 + unpacked('>I2', gate)) end

local function quota_of(gate)
    local quota = quotas_by_gate[gate]
    if quota ~= nil then return quota end
    local limit = limit_of(gate)
    quota = quotas[limit]
    if quota == nil then
        local packed = redis.call('HGET', key.limits, sub(limit, 3))
        quota = packed and #packed > 17 and {
            slots = unpacked('>I4', packed), interval = unpacked('>I8', packed, 5), burst = unpacked('>I4', packed, 13),
            fair = sub(packed, 17, 17) == 'f',
        } or false
        quotas[limit] = quota
    end
    quotas_by_gate[gate] = quota
    return quota
end

local function is_fair(gate)
    local quota = quota_of(gate)
    return quota and quota.fair
end

local function is_in(gates, gate)
    for i = 1, #gates do
        if gates[i] == gate then return true end
    end
    return false
end

-- Returns the same table for all jobs with the same gates. *at*: the position of the gates, if the caller knows it.
local function gates_of(record, at)
    at = at or gates_at(record)
    local terms = at and sub(record, at) or ''
    local gates = gates_by_terms[terms]
    if gates then return gates end
    gates = {}
    gates_by_terms[terms] = gates
    while at and at + 1 < #record do
        local first = at
        at = at + 2 + unpacked('>I2', record, at)
        if at + 1 > #record then break end
        at = at + 2 + unpacked('>I2', record, at)
        if at - 1 > #record then break end -- another program has cut the record
        local gate = sub(record, first, at - 1)
        if not is_in(gates, gate) then gates[#gates + 1] = gate end
    end
    return gates
end

local function leases_at(gate)
    local count = used[gate]
    if not count then
        count = tonumber(redis.call('HGET', key.slot_counts, gate) or 0) or 0
        used[gate] = count
    end
    return count
end

local function arrival_at(gate)
    local at = arrivals[gate]
    if not at then
        at = tonumber(redis.call('ZSCORE', key.rates, gate) or 0)
        -- A later time comes only from an earlier, slower rate, or from a clock that was set back.
        local quota = quota_of(gate)
        local latest = quota and quota.interval > 0 and now + quota.burst * quota.interval or math.huge
        if at > latest then
            at = latest
            if key.openings then redis.call('ZADD', key.rates, string.format('%.0f', at), gate) end -- not in held_by.lua
        end
        arrivals[gate] = at
    end
    return at
end

-- Returns the time at which a gate opens. 0: the gate is open now. Infinity: the gate does not open by time alone.
local function opens_at(gate)
    local quota = quota_of(gate)
    if not quota then return 0 end
    if quota.slots < ANY and leases_at(gate) >= quota.slots then return math.huge end
    if quota.interval == 0 then return 0 end
    local at = arrival_at(gate) - (quota.burst - 1) * quota.interval
    return at <= now and 0 or at
end

local function closed_one(gates)
    for i = 1, #gates do
        if opens_at(gates[i]) ~= 0 then return gates[i] end
    end
    return nil
end
