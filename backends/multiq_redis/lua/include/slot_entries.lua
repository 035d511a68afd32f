-- The live leases of each gate. The table `key` maps names to keys.
-- A lease is an entry of its own, or several leases of one gate that one call hands out are a group: they have the same token,
-- which no other call's leases have. A group is divided into its leases as soon as its first lease may have ended.
-- slot_ends: set of entries: gate and id of a lease, or gate and token of a group. The score is the end of the lease. Before the
--   score of a group, none of its leases ends.
-- slot_counts: hash, gate -> the number of its leases; group -> the number of its leases that are not settled
-- slot_ids: hash, group -> the ids of its jobs (MessagePack), also of those whose leases are settled
local TOKEN_SIZE = 12 -- ids are longer

-- Returns the gate of an entry, and the rest: an id or a token.
local function parts_of(entry)
    local size = 2 + unpacked('>I2', entry)
    size = size + 2 + unpacked('>I2', entry, size + 1)
    return sub(entry, 1, size), sub(entry, size + 1)
end

local function ids_of(group)
    local is_valid, ids = pcall(cmsgpack.unpack, redis.call('HGET', key.slot_ids, group) or '')
    if not is_valid or type(ids) ~= 'table' then return {} end
    for i = 1, #ids do
        if type(ids[i]) ~= 'string' then return {} end
    end
    return ids
end

local function number_of(stored)
    local number = tonumber(stored)
    return number and number > 0 and number < 1e9 and number or 0
end
