-- The marker of parked jobs (include/parked.lua, whose functions it uses). The table `key` maps names to keys.
local function first_time(set)
    local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
    return first[2] and tonumber(first[2])
end

-- Sets or removes the marker. If a line may be open, the marker is in the ready set. Otherwise it is in the delayed set, at
-- the next time at which a line opens. *first_end*: the first end of leases that this call counts, and writes later.
local function set_marker(first_end)
    if not is_any_parked then return end
    local is_any = redis.call('EXISTS', key.parked) == 1
    if is_any and redis.call('EXISTS', key.open_lines) == 1 then
        redis.call('ZREM', key.delayed, MARKER)
        redis.call('ZADD', key.ready, '0', MARKER)
    else
        redis.call('ZREM', key.ready, MARKER)
        if not is_any then
            redis.call('ZREM', key.delayed, MARKER)
            forget_turns()
            return
        end
        local at = math.min(
            first_time(key.openings) or math.huge,
            first_time(key.slot_ends) or math.huge,
            first_end or math.huge,
            now + NOT_SOON
        )
        redis.call('ZADD', key.delayed, string.format('%.0f', at), MARKER)
    end
end
