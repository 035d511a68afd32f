-- Frees the slots of the leases that verdicts have ended. Returns false if the entries must be divided and counted again.
local function free_settled()
    local removed = redis.call('ZREM', key.slot_ends, unpack(ended_slots))
    if removed == #ended_slots then return change_numbers(freed) end
    -- Some of the leases are in groups.
    local changes, gone, alone = {}, {}, #ended_slots
    for gate, change in pairs(freed) do changes[gate] = change end
    for group, count in pairs(ended_groups) do
        local number = redis.call('HGET', key.slot_counts, group)
        if number then
            alone = alone - count
            changes[group] = -count
            if (tonumber(number) or 0) <= count then gone[#gone + 1] = group end
        end
    end
    if removed ~= alone then return false end
    local is_right = change_numbers(changes)
    if #gone > 0 then
        redis.call('HDEL', key.slot_ids, unpack(gone))
        is_right = redis.call('ZREM', key.slot_ends, unpack(gone)) == #gone and is_right
    end
    return is_right
end
