-- Frees the slots of a group whose first lease may have ended, and makes its live leases entries of their own. Returns the
-- number of the freed slots, and whether the numbers were right.
local function divide(group, gate, token)
    local number = number_of(redis.call('HGET', key.slot_counts, group))
    local live, ended = live_leases(group, token)
    local changes, entries = { [gate] = -ended, [group] = -number }, {}
    for i = 1, #live, 2 do
        entries[i], entries[i + 1] = live[i], gate .. live[i + 1]
    end
    local is_right = change_numbers(changes) and number > 0
    redis.call('HDEL', key.slot_ids, group)
    is_right = redis.call('ZREM', key.slot_ends, group) == 1 and is_right
    if #live > 0 then is_right = 2 * redis.call('ZADD', key.slot_ends, unpack(entries)) == #entries and is_right end
    return ended, is_right
end
