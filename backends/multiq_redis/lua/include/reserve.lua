-- Makes due jobs ready, and reserves jobs.
-- The most bytes of bodies and memos in one reply. A reply of this size takes the server some milliseconds, and a slow
-- link some seconds.
local MOST_BYTES = 8000000
local NO_PLACE = string.rep('\0', 12) .. '\128'
local token, limit = ARGV[2], tonumber(ARGV[3])
local partitions = redis.call('GET', KEYS[12]) or ''

local function paused_until()
    local at = pause_end(KEYS[10])
    return at > now and at or nil
end

local function show(reply, size, id, record)
    reply[size + 1] = id
    reply[size + 2] = record
    size = size + 2
    local flags = flags_of(record)
    if flags % 2 == 1 then
        size = size + 1
        reply[size] = redis.call('HGET', KEYS[3], id) or ''
    end
    if flags >= 128 then
        size = size + 1
        reply[size] = redis.call('HGET', KEYS[3], id .. '\1') or ''
    end
    if flags >= 196 then
        size = size + 1
        reply[size] = redis.call('HGET', KEYS[3], id .. '\2') or ''
    end
    return size
end

-- Set by scripts that look at gates. The first function takes a record and the position of its gates. It returns the gates
-- if all of them are open, and otherwise nil. The second function counts a job at its gates.
local open_gates, enter

-- Stops before the bodies from the bodies hash exceed MOST_BYTES, but hands out at least one job. Bodies inside records are
-- not counted, because in one call all of them together have fewer bytes.
local function hand_out(reply)
    local places = redis.call('ZRANGE', KEYS[5], 0, limit - 1) -- ZPOPMIN is slower: it deletes one by one
    if #places == 0 then return {} end
    local ids, taken, fields, leases = {}, {}, {}, {}
    local ends_at = {} -- packed ttr -> the lease's end; text, because Redis would convert a number for each job
    for i = 1, #places do ids[i] = id_in(places[i]) end
    local records = redis.call('HMGET', KEYS[2], unpack(ids))
    local count, size, number, bytes = 0, #reply, #ids, 0
    for i = 1, #ids do
        local id, place, record = ids[i], places[i], records[i]
        local ttr = record and sub(record, 21, 28)
        -- each ttr is checked once; for other jobs with the same ttr, only the sizes are checked
        local fault = not (ttr and ends_at[ttr] and #place == 28 and #record >= 53) and fault_of(place, record)
        if fault then
            set_aside(place, record, fault, KEYS[2], KEYS[3], KEYS[4], KEYS[13])
        elseif record then -- if there is no record, another program has deleted the job
            local flags = flags_of(record)
            local body, memo, gates
            if flags > 0 then
                local gates_from = flags % 2 == 1 and #record > 53 and gates_at(record)
                if gates_from then
                    gates = open_gates and open_gates(record, gates_from)
                    if not gates then
                        reply[1], number = '3', i - 1
                        break
                    end
                end
                body = flags % 2 == 1 and (redis.call('HGET', KEYS[3], id) or '')
                memo = flags >= 128 and (redis.call('HGET', KEYS[3], id .. '\1') or '')
                bytes = bytes + (body and #body or 0) + (memo and #memo or 0)
                if bytes > MOST_BYTES and count > 0 then
                    reply[1], number = '2', i - 1
                    break
                end
            end
            record = sub(record, 1, 28) .. pack('>I4', unpacked('>I4', record, 29) + 1) .. sub(record, 33, 41) .. token
                .. sub(record, 54)
            if not ends_at[ttr] then ends_at[ttr] = string.format('%.0f', now + unpacked('>I8', ttr)) end
            if gates then enter(gates, id, ends_at[ttr]) end
            count = count + 1
            taken[count] = id
            fields[2 * count - 1], fields[2 * count] = id, record
            local at = 2 * (#ids - count) -- from the back: a small set is a list, which is searched from its beginning
            leases[at + 1], leases[at + 2] = ends_at[ttr], place
            reply[size + 1], reply[size + 2] = id, record
            size = size + 2
            if flags > 0 then
                if body then
                    size = size + 1
                    reply[size] = body
                end
                if memo then
                    size = size + 1
                    reply[size] = memo
                    if flags >= 196 then
                        size = size + 1
                        reply[size] = redis.call('HGET', KEYS[3], id .. '\2') or ''
                    end
                end
            end
        elseif #place == 29 and sub(place, 1, 13) == NO_PLACE then -- the marker of include/parked.lua
            reply[1], number = '3', i - 1
            break
        end
    end
    if number > 0 then redis.call('ZREMRANGEBYRANK', KEYS[5], 0, number - 1) end
    if count == 0 and reply[1] == '3' then return {} end
    if count == 0 then
        reply[1] = '1' -- none of these places had a valid job; later places may have one
    else
        redis.call('HSET', KEYS[2], unpack(fields))
        redis.call('ZADD', KEYS[7], unpack(leases, 2 * (#ids - count) + 1, 2 * #ids))
    end
    return taken
end

local function next_change()
    local due_at, ends_at = first_at(KEYS[6]), first_at(KEYS[7])
    if due_at and ends_at then return math.min(due_at, ends_at) end
    return due_at or ends_at
end

-- The notified consumer stops waiting. So another consumer is notified if ready jobs remain, or if jobs are due soon.
local function pass_on()
    if redis.call('EXISTS', KEYS[5]) == 0 then
        local change_at = next_change()
        if not change_at or change_at >= now + HORIZON then return end
    end
    notify(KEYS[11])
end

local function reserve(reply)
    local paused = paused_until()
    if paused then
        reply[3] = string.format('%.0f', paused)
        return {}
    end
    if promote(KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[13]) then
        reply[1] = '1'
        return {}
    end
    local taken = hand_out(reply)
    if #taken > 0 then
        pass_on()
    else
        local change_at = next_change()
        reply[3] = change_at and string.format('%.0f', change_at) or ''
    end
    return taken
end

