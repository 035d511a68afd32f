-- Frees the slots of the leases that verdicts have ended. Returns false if the numbers must be counted again.
local function free_settled()
    local removed = redis.call('ZREM', key.slot_ends, unpack(ended_slots))
    if removed == #ended_slots then return change_numbers(freed) end
    -- Some of the leases are in groups.
    local changes, left = {}, #ended_slots - removed
    for gate, change in pairs(freed) do changes[gate] = change end
    for group, count in pairs(ended_groups) do
        local number = redis.call('HGET', key.slot_counts, group)
        if number then
            left = left - count
            changes[group] = -count
            if (tonumber(number) or 0) <= count then
                redis.call('ZREM', key.slot_ends, group)
                redis.call('HDEL', key.slot_ids, group)
            end
        end
    end
    return change_numbers(changes) and left == 0
end
