-- Held jobs. The table `key` maps names to keys (keys.py).
-- A held job's place is in the held set, where all scores are 0. Its terms are a field of the terms hash, named by its id,
-- packed big-endian:   1-4 arrivals that it waits for   5-8 members that have arrived   9-16 its delay, us
-- The arrived set has an entry for each member that has arrived. All scores are 0. The entry is the first 16 bytes of the
-- held job's record, then the member's text. No other job of the queue ever has these 16 bytes. The litter set has the 16
-- bytes of each job that is no longer held but still has members in the arrived set.
local MOST_DELETED = 1000 -- members that one script deletes, in a millisecond
local left_to_delete = MOST_DELETED

-- Returns whether all members of a job are deleted. No member contains the byte 0xFF, because members are UTF-8.
local function delete_arrived(head)
    local found = redis.call('ZRANGE', key.arrived, '[' .. head, '(' .. head .. '\255', 'BYLEX', 'LIMIT', 0, left_to_delete + 1)
    local all = #found <= left_to_delete
    if not all then found[#found] = nil end
    if #found > 0 then redis.call('ZREM', key.arrived, unpack(found)) end
    left_to_delete = left_to_delete - #found
    return all
end

-- Deletes the terms and the arrivals of a job that is no longer held.
local function forget_terms(id, record)
    local terms = redis.call('HGET', key.terms, id)
    if not terms then return end
    redis.call('HDEL', key.terms, id)
    local head = sub(record, 1, 16)
    if count_at(terms, 5) > 0 and not delete_arrived(head) then redis.call('ZADD', key.litter, '0', head) end
end

local function collect_litter()
    local heads = redis.call('ZRANGE', key.litter, 0, 9)
    for i = 1, #heads do
        if not delete_arrived(heads[i]) then return end
        redis.call('ZREM', key.litter, heads[i])
    end
end
