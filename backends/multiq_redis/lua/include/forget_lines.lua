-- If the queue has no jobs, deletes the keys of its lines and leases. The quotas and the rates' times stay. The table `key`
-- maps names to keys.
local function forget_lines()
    if redis.call('EXISTS', key.jobs) == 1 then return false end
    redis.call(
        'DEL', key.lines, key.parked, key.line_states, key.open_lines, key.fair_lines, key.blocked, key.slots, key.slot_ends,
        key.openings
    )
    return true
end

-- Deletes the entries of leases that have ended and whose jobs are gone. While jobs are parked, the next reserve does this,
-- because it must then also look at the lines that the ended leases have closed.
local function forget_ended()
    if redis.call('EXISTS', key.parked) == 1 then return end
    local ended = redis.call('ZRANGEBYSCORE', key.slot_ends, '-inf', now, 'LIMIT', 0, 500)
    for i = 1, #ended do
        local size = 2 + unpacked('>I2', ended[i])
        size = size + 2 + unpacked('>I2', ended[i], size + 1)
        if not redis.call('HGET', key.jobs, sub(ended[i], size + 1)) then
            redis.call('ZREM', key.slot_ends, ended[i])
            redis.call('ZREM', key.slots, ended[i])
        end
    end
end
