--- flags: no-writes
-- Count the live leases or the parked jobs of each gate.
-- KEYS  1 limits   2 slots   3 lines   4 slot_ends
-- ARGV  1 slots or lines   2 the gate after which to begin, or nothing
-- =>    the stored limits: name and quota of each, if the gate is nothing; the gate after which to go on, or nothing;
--       and gate and number of each
--- include clock
local sub, unpacked = string.sub, struct.unpack
local MOST = 200 -- gates in one reply
local MOST_ENDED = 10000 -- ended leases, in some milliseconds
local set = ARGV[1] == 'slots' and KEYS[2] or KEYS[3]
local after = string.rep('\255', 17) -- sorts after any text that follows a gate in a member
-- The next reserve deletes the entries of leases that have ended.
local ended = {}
for _, member in ipairs(set == KEYS[2] and redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', now, 'LIMIT', 0, MOST_ENDED) or {}) do
    local size = 2 + unpacked('>I2', member)
    local gate = sub(member, 1, size + 2 + unpacked('>I2', member, size + 1))
    ended[gate] = (ended[gate] or 0) + 1
end
local found, from = {}, ARGV[2] == '' and '-' or '(' .. ARGV[2] .. after
local last = ''
while #found < 2 * MOST do
    local member = redis.call('ZRANGE', set, from, '+', 'BYLEX', 'LIMIT', 0, 1)[1]
    if not member then
        last = ''
        break
    end
    local size = 2 + unpacked('>I2', member)
    last = sub(member, 1, size + 2 + unpacked('>I2', member, size + 1))
    found[#found + 1] = last
    found[#found + 1] = redis.call('ZLEXCOUNT', set, '[' .. last, '(' .. last .. after) - (ended[last] or 0)
    from = '(' .. last .. after
end
return { ARGV[2] == '' and redis.call('HGETALL', KEYS[1]) or {}, last, found }
