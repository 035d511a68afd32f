--- flags: no-writes
-- Count the live leases or the parked jobs of each gate.
-- KEYS  1 limits   2 slot_counts   3 lines   4 slot_ends   5 slot_ids   6 jobs   7 reserved
-- ARGV  1 slots or lines   2 where to go on: what the previous reply says, or nothing
-- =>    the stored limits: name and quota of each, if this is the first call; where to go on, or nothing; gate and number of
--       each; and gate and number of the leases among them that have ended, if this is the first call. A gate may be in two
--       replies.
--- include record
--- include clock
local key = { slot_counts = KEYS[2], slot_ids = KEYS[5], jobs = KEYS[6], reserved = KEYS[7] }
--- include slot_entries
--- include live_slots
--- include ended_slots
local MOST = 200 -- gates in one reply
local after = string.rep('\255', 17) -- sorts after any text that follows a gate in a member
local is_first = ARGV[2] == ''

local function leases()
    local reply, found, ended = redis.call('HSCAN', key.slot_counts, is_first and '0' or ARGV[2], 'COUNT', MOST), {}, {}
    for i = 1, #reply[2], 2 do
        local gate, rest = parts_of(reply[2][i])
        if rest == '' then
            found[#found + 1], found[#found + 2] = gate, number_of(reply[2][i + 1])
        end
    end
    if is_first then
        for gate, number in pairs(ended_leases(KEYS[4])) do
            ended[#ended + 1], ended[#ended + 2] = gate, number
        end
    end
    return reply[1] == '0' and '' or reply[1], found, ended
end

local function parked()
    local found, from, last = {}, is_first and '-' or '(' .. ARGV[2] .. after, ''
    while #found < 2 * MOST do
        local member = redis.call('ZRANGE', KEYS[3], from, '+', 'BYLEX', 'LIMIT', 0, 1)[1]
        if not member then return '', found, {} end
        last = parts_of(member)
        found[#found + 1] = last
        found[#found + 1] = redis.call('ZLEXCOUNT', KEYS[3], '[' .. last, '(' .. last .. after)
        from = '(' .. last .. after
    end
    return last, found, {}
end

local go_on, found, ended
if ARGV[1] == 'slots' then
    go_on, found, ended = leases()
else
    go_on, found, ended = parked()
end
return { is_first and redis.call('HGETALL', KEYS[1]) or {}, go_on, found, ended }
