-- Makes a slice of the due jobs ready. A lease that has ended counts as a crash. Returns true if there may be more due jobs.
-- The removals come first, because the server allows them at maxmemory. If the first write of a script is allowed, Redis 6.2
-- also allows the rest of the script.
local SLICE = 500

local function promote_due(jobs, bodies, reasons, ready, delayed, unreadable)
    local places = redis.call('ZRANGEBYSCORE', delayed, '-inf', now, 'LIMIT', 0, SLICE)
    if #places == 0 then return false end
    local scored = {}
    redis.call('ZREMRANGEBYRANK', delayed, 0, #places - 1)
    for i = 1, #places do
        local fault = fault_of(places[i])
        if fault then
            set_aside(places[i], nil, fault, jobs, bodies, reasons, unreadable)
        else
            scored[#scored + 1] = priority_in(places[i])
            scored[#scored + 1] = places[i]
        end
    end
    if #scored > 0 then redis.call('ZADD', ready, unpack(scored)) end
    return #places == SLICE
end

local function promote_abandoned(jobs, bodies, reasons, ready, reserved, unreadable)
    local places = redis.call('ZRANGEBYSCORE', reserved, '-inf', now, 'LIMIT', 0, SLICE)
    if #places == 0 then return false end
    local ids, scored, fields = {}, {}, {}
    for i = 1, #places do ids[i] = id_in(places[i]) end
    local records = redis.call('HMGET', jobs, unpack(ids))
    redis.call('ZREMRANGEBYRANK', reserved, 0, #places - 1)
    for i = 1, #places do
        local record = records[i]
        local fault = fault_of(places[i], record)
        if fault then
            set_aside(places[i], record, fault, jobs, bodies, reasons, unreadable)
        elseif record then
            fields[#fields + 1] = ids[i]
            fields[#fields + 1] = sub(record, 1, 32) .. u32(count_at(record, 33) + 1) .. sub(record, 37, 41) .. NO_HOLDER
                .. sub(record, 54)
            scored[#scored + 1] = priority_in(places[i])
            scored[#scored + 1] = places[i]
        end
    end
    if #fields > 0 then
        redis.call('HSET', jobs, unpack(fields))
        redis.call('ZADD', ready, unpack(scored))
    end
    return #places == SLICE
end

local function promote(jobs, bodies, reasons, ready, delayed, reserved, unreadable)
    local more_abandoned = promote_abandoned(jobs, bodies, reasons, ready, reserved, unreadable)
    return promote_due(jobs, bodies, reasons, ready, delayed, unreadable) or more_abandoned
end
