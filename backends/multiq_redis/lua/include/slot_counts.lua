-- Changes the numbers of live leases (include/slot_entries.lua).
local MOST_LEASES = 1e9 -- more than any gate has

-- *changes*: gate or group -> by how much its number changes. Deletes numbers that become zero. Returns false if the stored
-- numbers are wrong. The caller then has to call `count_again`.
local function change_numbers(changes)
    local is_right, fields = true, {}
    for name, change in pairs(changes) do
        local number = (tonumber(redis.call('HGET', key.slot_counts, name) or '0') or -MOST_LEASES) + change
        if number > 0 and number < MOST_LEASES and number % 1 == 0 then
            fields[#fields + 1], fields[#fields + 2] = name, number
        else
            is_right = is_right and number == 0
            redis.call('HDEL', key.slot_counts, name)
        end
    end
    for first = 1, #fields, 4000 do -- Lua's stack cannot hold many more
        redis.call('HSET', key.slot_counts, unpack(fields, first, math.min(first + 3999, #fields)))
    end
    return is_right
end
