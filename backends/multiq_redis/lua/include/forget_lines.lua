-- If the queue has no jobs, deletes the keys of its lines and leases. The quotas and the rates' times stay. The table `key`
-- maps names to keys.
local function forget_lines()
    if redis.call('EXISTS', key.jobs) == 1 then return false end
    redis.call(
        'DEL', key.lines, key.parked, key.line_states, key.open_lines, key.fair_lines, key.blocked, key.slot_counts,
        key.slot_ends, key.slot_ids, key.openings
    )
    return true
end

-- Deletes the entries of leases that have ended and whose jobs are gone. While jobs are parked, the next reserve does this,
-- because it must then also look at the lines that the ended leases have closed.
local function forget_ended()
    if redis.call('EXISTS', key.parked) == 1 then return end
    local ended = redis.call('ZRANGEBYSCORE', key.slot_ends, '-inf', now, 'LIMIT', 0, 500)
    local examined, entries, groups, changes, is_right = 0, {}, {}, {}, true
    for i = 1, #ended do
        local gate, rest = parts_of(ended[i])
        local ids, number, is_gone = { rest }, 1, true
        if #rest == TOKEN_SIZE then
            ids, number = ids_of(ended[i]), number_of(redis.call('HGET', key.slot_counts, ended[i]))
        end
        examined = examined + #ids
        if examined > 500 then break end
        for j = 1, #ids do is_gone = is_gone and not redis.call('HGET', key.jobs, ids[j]) end
        if is_gone then
            entries[#entries + 1] = ended[i]
            changes[gate] = (changes[gate] or 0) - number
            if #rest == TOKEN_SIZE then
                groups[#groups + 1] = ended[i]
                changes[ended[i]] = -number
                is_right = is_right and number > 0
            end
        end
    end
    if #entries == 0 then return end
    is_right = change_numbers(changes) and is_right
    if #groups > 0 then redis.call('HDEL', key.slot_ids, unpack(groups)) end
    is_right = redis.call('ZREM', key.slot_ends, unpack(entries)) == #entries and is_right
    if not is_right then count_again() end
end
