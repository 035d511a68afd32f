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
