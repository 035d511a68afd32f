-- Returns gate -> the number of its leases that have ended. The next reserve frees their slots.
local MOST_ENDED = 10000 -- entries, in some milliseconds
local MOST_READ = 2000 -- leases of groups, in some milliseconds

local function ended_leases(slot_ends)
    local ended, left = {}, MOST_READ
    local entries = redis.call('ZRANGEBYSCORE', slot_ends, '-inf', now, 'LIMIT', 0, MOST_ENDED)
    for i = 1, #entries do
        local gate, rest = parts_of(entries[i])
        local number = 1
        if #rest == TOKEN_SIZE then
            left = left - #ids_of(entries[i])
            if left < 0 then break end
            local _, others = live_leases(entries[i], rest)
            number = others
        end
        ended[gate] = (ended[gate] or 0) + number
    end
    return ended
end
