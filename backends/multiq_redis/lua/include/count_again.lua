-- Computes all numbers from the entries, because another program has changed something, or because a call was repeated after
-- the server had forgotten it. This is rare: it takes a millisecond for 2,000 entries.
local function count_again()
    local numbers, fields = {}, {}
    local entries = redis.call('ZRANGE', key.slot_ends, 0, -1)
    for i = 1, #entries do
        local gate, rest = parts_of(entries[i])
        local number = 1
        if #rest == TOKEN_SIZE then
            number = math.min(number_of(redis.call('HGET', key.slot_counts, entries[i])), #ids_of(entries[i]))
            numbers[entries[i]] = number
        end
        numbers[gate] = (numbers[gate] or 0) + number
    end
    for name, number in pairs(numbers) do
        if number > 0 then
            fields[#fields + 1], fields[#fields + 2] = name, number
        end
    end
    redis.call('DEL', key.slot_counts)
    for first = 1, #fields, 4000 do -- Lua's stack cannot hold many more
        redis.call('HSET', key.slot_counts, unpack(fields, first, math.min(first + 3999, #fields)))
    end
end
