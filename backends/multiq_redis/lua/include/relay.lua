-- Carries out the groups. `source` is the outbox of the groups. In a cluster, `source` is nil, because the outbox may be on
-- another node.
local REMEMBERED = 7 * 86400 * 1000000 -- us: if an outbox is not cleared for this long, its groups could be repeated
local DROPPED_PER_GROUP = 2 -- how many expired marks each new mark deletes: more than one, so that their number falls

local function read_groups()
    local groups, i = {}, 3
    while i <= #ARGV do
        local first = i + 4
        local last = first + 3 * tonumber(ARGV[i + 3]) - 1
        groups[#groups + 1] = { score = ARGV[i], mark = ARGV[i + 1], target = ARGV[i + 2], first = first, last = last }
        i = last + 1
    end
    return groups
end

-- Returns the groups that can be carried out now: mark -> member of the outbox. Groups of plain arrivals (letter a) can
-- be carried out in any order. Any other group waits for all groups before it, and all groups after it wait for it.
local function whose_turn_it_is(groups)
    local own, found, is_any_left = {}, {}, false
    for i = 1, #groups do own[groups[i].mark] = true end
    for _, member in ipairs(redis.call('ZRANGEBYSCORE', source, '-inf', groups[#groups].score)) do
        local mark, is_plain = sub(member, 1, 14), sub(member, 15, 15) == 'p'
        if own[mark] and (is_plain or not is_any_left) then
            found[mark] = member
        elseif is_plain then
            is_any_left = true
        else
            break
        end
    end
    return found
end

local function drop_expired(limit)
    local expired = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, limit)
    if #expired > 0 then redis.call('ZREM', KEYS[1], unpack(expired)) end
end

redis.call('ZREM', KEYS[1], '') -- on Redis 6.2 the first write decides whether the script may run at maxmemory
check_types()
local groups, count = read_groups(), 0
local found = source and whose_turn_it_is(groups)
for i = 1, #groups do
    local group = groups[i]
    local mark, target = group.mark, group.target
    if not found or found[mark] then
        if not redis.call('ZSCORE', KEYS[1], mark) then
            count = count + 1
            carry_out_steps(group.first, group.last)
            forward(string.byte(target, 1), string.byte(target, 2), token .. pack('>I2', 60000 + count))
            redis.call('ZADD', KEYS[1], now + REMEMBERED, mark)
        end
        if found then redis.call('ZREM', source, found[mark]) end
    end
end
drop_expired(DROPPED_PER_GROUP * count)
finish_steps()
return is_forwarded and 1 or 0
