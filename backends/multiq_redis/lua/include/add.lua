-- Adds jobs that may have unique keys and gates. The table `key` maps names to keys.
local INLINE_BODY = 1024 -- bytes of the largest body inside a record
local HEAD = 37 -- bytes of a record from the priority to the body
local added_ready = false -- whether a job became ready

local function make_due_after(delay, place)
    if delay > 0 then
        redis.call('ZADD', key.delayed, now + delay, place)
        notify_if_first(key.hint, key.delayed, now + delay)
    else
        redis.call('ZADD', key.ready, priority_in(place), place)
        added_ready = true
    end
end

-- Gives a ready, delayed or held job the data of another enqueue.
local function replace(id, record, rest, delay, max_wait, gates)
    local place = place_of(id, record)
    local is_held = redis.call('ZSCORE', key.held, place)
    local lease_ends = redis.call('ZSCORE', key.reserved, place)
    if lease_ends and tonumber(lease_ends) > now or redis.call('ZSCORE', key.buried, place) then return end
    unpark(id, record)
    for _, set in ipairs({ 'ready', 'delayed', 'reserved', 'held' }) do redis.call('ZREM', key[set], place) end
    redis.call('HDEL', key.bodies, id .. '\1', id .. '\2')
    redis.call('HDEL', key.reasons, id, id .. '\1')
    redis.call('HSET', key.bodies, id, sub(rest, HEAD + 1))
    record = sub(record, 1, 16) .. sub(rest, 1, 24) .. '\1' .. NO_HOLDER .. sub(record, 54, 55 + string.byte(record, 55)) .. gates
    redis.call('HSET', key.jobs, id, record)
    place = place_of(id, record)
    if is_held then
        local terms = redis.call('HGET', key.terms, id)
        if terms then redis.call('HSET', key.terms, id, sub(terms, 1, 8) .. u64(delay)) end
        redis.call('ZADD', key.held, '0', place)
    else
        make_due_after(math.min(delay, math.max(0, max_wait - (now - unpacked('>I8', record, 9)))), place)
    end
end

-- *details*: delay, us (8 bytes), awaits (4 bytes); and of a job with terms: hold and max_wait, us (8 bytes each), 1 byte: r
-- replace or k keep, and the bytes that follow the record (include/key_and_gates.lua). *rest*: the record from the priority on.
-- Returns the id of the new job, of the replaced job, or of the job that has the key.
local function add(details, id, rest)
    if redis.call('HGET', key.jobs, id) then return id end
    local delay, awaits = unpacked('>I8I4', details)
    local terms = sub(details, 30)
    local unique_key, hold
    if terms ~= '' and sub(terms, 1, 1) ~= 'G' then
        local size = string.byte(terms, 2)
        unique_key = sub(terms, 3, 2 + size)
        local max_wait
        hold, max_wait = unpacked('>I8I8', details, 13)
        local owner, record = owner_of(unique_key)
        if owner then
            if record and owner ~= id and sub(details, 29, 29) == 'r' then
                replace(owner, record, rest, delay, max_wait, sub(terms, 3 + size))
            end
            return owner
        end
    end
    local head = u64(redis.call('INCR', key.sequence))
    local place = head .. sub(rest, 1, 4) .. id
    if terms ~= '' or #rest > HEAD + INLINE_BODY then
        redis.call('HSET', key.bodies, id, sub(rest, HEAD + 1))
        rest = sub(rest, 1, 24) .. '\1' .. NO_HOLDER .. terms
    end
    redis.call('HSET', key.jobs, id, head .. u64(now) .. rest)
    if unique_key then take_unique(unique_key, id, hold) end
    if awaits > 0 then
        redis.call('HSET', key.terms, id, u32(awaits) .. u32(0) .. u64(delay))
        redis.call('ZADD', key.held, '0', place)
    else
        make_due_after(delay, place)
    end
    return id
end
