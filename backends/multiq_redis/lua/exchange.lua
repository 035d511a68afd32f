--- flags: allow-oom
-- Settle leases, make ready what is due, reserve the next jobs.
-- KEYS  1 call   2 jobs   3 bodies   4 reasons   5 ready   6 delayed   7 reserved   8 buried   9 sequence
--       10 paused   11 hint   12 partitions   13 unreadable
-- ARGV  1 number   2 token for the new leases   3 how many of them
--       then for each verdict: the job's id, and the lease's token with one letter and the details:
--       a ack   g give back, delay in us or nothing   t touch   b bury, reason   x abandon, reason   r release, "delay in us:priority or nothing:", reason
--       (a reason is a + and the text, or nothing if there is none)
-- =>    more: 1 if no job is handed out, but there may be jobs (after a slice of the due jobs, or in a repetition)
--       2 if there are more jobs, but the jobs handed out have 8 MB of bodies
--       now, and when a delay, a lease or a pause ends next (us; nothing if never, or if jobs are handed out)
--       a letter for each verdict: 1 done, 0 the lease is over
--       how many partitions the queue has, or nothing if that is not stored
--       then for each job: its id, its record, and its body if the body is in the bodies hash
--- include record
--- include once
--- include clock
--- include notify
--- include validate
--- include promote
--- include empty
--- include pause

local MOST_BYTES = 8000000 -- of bodies in one reply: some milliseconds of the server, and seconds of a slow link
local token, limit = ARGV[2], tonumber(ARGV[3])
local partitions = redis.call('GET', KEYS[12]) or ''

-- --- settling ---

local function refusals()
    local live_until = first_at(KEYS[7])
    local all_live = live_until and live_until > now
    return function(place)
        if all_live then return false end
        local ends_at = redis.call('ZSCORE', KEYS[7], place)
        return not ends_at or tonumber(ends_at) <= now
    end
end

local function with_reason(id, record, reason)
    local flags = flags_of(record)
    local had = flags >= 2
    if reason ~= '' then
        redis.call('HSET', KEYS[4], id, sub(reason, 2))
        flags = had and flags or flags + 2
    elseif had then
        redis.call('HDEL', KEYS[4], id)
        flags = flags - 2
    end
    return sub(record, 1, 40) .. string.char(flags) .. NOBODY .. sub(record, 54)
end

local became_ready = false

local function make_ready(place)
    redis.call('ZADD', KEYS[5], priority_in(place), place)
    became_ready = true
end

local function delay_by(delay, place)
    local due_at = now + delay
    redis.call('ZADD', KEYS[6], due_at, place)
    notify_if_first(KEYS[11], KEYS[6], due_at)
end

local carry_out = {}

function carry_out.g(id, record, place, delay)
    redis.call('ZREM', KEYS[7], place)
    local attempts = count_at(record, 29) - 1
    record = sub(record, 1, 28) .. u32(attempts) .. sub(record, 33, 41) .. NOBODY .. sub(record, 54)
    redis.call('HSET', KEYS[2], id, record)
    if delay == '' then make_ready(place) else delay_by(tonumber(delay), place) end
end

function carry_out.x(id, record, place, reason)
    redis.call('ZREM', KEYS[7], place)
    record = with_reason(id, record, reason)
    local crashes = count_at(record, 33) + 1
    redis.call('HSET', KEYS[2], id, sub(record, 1, 32) .. u32(crashes) .. sub(record, 37))
    make_ready(place)
end

function carry_out.t(_, record, place)
    redis.call('ZADD', KEYS[7], 'XX', now + ttr_of(record), place)
end

function carry_out.b(id, record, place, reason)
    redis.call('ZREM', KEYS[7], place)
    redis.call('HSET', KEYS[2], id, with_reason(id, record, reason))
    redis.call('ZADD', KEYS[8], redis.call('INCR', KEYS[9]), place)
end

function carry_out.r(id, record, place, details)
    local delay, priority, reason = string.match(details, '^(%d+):(%d*):(.*)$')
    redis.call('ZREM', KEYS[7], place)
    record = with_reason(id, record, reason)
    if priority ~= '' then
        record = sub(record, 1, 16) .. u32(tonumber(priority)) .. sub(record, 21)
        place = place_of(id, record)
    end
    redis.call('HSET', KEYS[2], id, record)
    if tonumber(delay) > 0 then
        delay_by(tonumber(delay), place)
    else
        make_ready(place)
    end
end

local is_any_gone = false

local function forget(places, ids, flagged)
    if #places == 0 then return end
    is_any_gone = true
    redis.call('ZREM', KEYS[7], unpack(places))
    redis.call('HDEL', KEYS[2], unpack(ids))
    if #flagged > 0 then
        redis.call('HDEL', KEYS[3], unpack(flagged))
        redis.call('HDEL', KEYS[4], unpack(flagged))
    end
end

local function settle()
    local ids, answers = {}, {}
    for i = 1, (#ARGV - 3) / 2 do ids[i] = ARGV[2 * i + 2] end
    if #ids == 0 then return '' end
    local records = redis.call('HMGET', KEYS[2], unpack(ids))
    local is_over = refusals()
    local settled, places, acked, flagged, count = {}, {}, {}, {}, 0
    for i = 1, #ids do
        local id, record, verdict = ids[i], records[i], ARGV[2 * i + 3]
        local place = record and place_of(id, record)
        if not record or settled[id] or sub(record, 42, 53) ~= sub(verdict, 1, 12) or is_over(place) then
            answers[i] = '0'
        else
            answers[i] = '1'
            local kind = sub(verdict, 13, 13)
            settled[id] = kind ~= 't'
            if kind == 'a' then
                count = count + 1
                places[count], acked[count] = place, id
                if flags_of(record) > 0 then flagged[#flagged + 1] = id end
            else
                carry_out[kind](id, record, place, sub(verdict, 14))
            end
        end
    end
    forget(places, acked, flagged)
    if became_ready then notify(KEYS[11]) end
    return table.concat(answers)
end

-- --- reserving ---

local function paused_until()
    local at = pause_end(KEYS[10])
    return at > now and at or nil
end

local function show(reply, size, id, record)
    reply[size + 1] = id
    reply[size + 2] = record
    if flags_of(record) % 2 == 0 then return size + 2 end
    reply[size + 3] = redis.call('HGET', KEYS[3], id) or ''
    return size + 3
end

-- Stops before the bodies in the bodies hash exceed MOST_BYTES, but hands out at least one job. The bodies inside of
-- records are not counted, because all of those in one call have fewer bytes.
local function hand_out(reply)
    local places = redis.call('ZRANGE', KEYS[5], 0, limit - 1) -- ZPOPMIN is slower: it deletes one by one
    if #places == 0 then return {} end
    local ids, taken, fields, leases = {}, {}, {}, {}
    local ends_at = {} -- by packed ttr; text, because Redis would convert a number for each job
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
        elseif record then -- else it was deleted by hand
            local body = flags_of(record) % 2 == 1 and (redis.call('HGET', KEYS[3], id) or '')
            if body then
                bytes = bytes + #body
                if bytes > MOST_BYTES and count > 0 then
                    reply[1], number = '2', i - 1
                    break
                end
            end
            record = sub(record, 1, 28) .. pack('>I4', unpacked('>I4', record, 29) + 1) .. sub(record, 33, 41) .. token
                .. sub(record, 54)
            if not ends_at[ttr] then ends_at[ttr] = string.format('%.0f', now + unpacked('>I8', ttr)) end
            count = count + 1
            taken[count] = id
            fields[2 * count - 1], fields[2 * count] = id, record
            local at = 2 * (#ids - count) -- from the back: a small set is a list, which is searched from its beginning
            leases[at + 1], leases[at + 2] = ends_at[ttr], place
            reply[size + 1], reply[size + 2] = id, record
            size = size + 2
            if body then
                size = size + 1
                reply[size] = body
            end
        end
    end
    redis.call('ZREMRANGEBYRANK', KEYS[5], 0, number - 1)
    if count == 0 then
        reply[1] = '1' -- none of these was a job; further ones may be
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

-- The notified consumer stops waiting. Another consumer is notified of the jobs left, and of jobs due soon.
local function pass_on()
    local change_at = next_change()
    if (change_at and change_at < now + HORIZON) or redis.call('EXISTS', KEYS[5]) == 1 then notify(KEYS[11]) end
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

-- --- a repetition ---

-- Returns the same answers again, and the jobs of the first reply that the same leases still hold.
local function again(seen)
    local colon = string.find(seen, ':', 1, true)
    local reply = { '0', string.format('%.0f', now), '', sub(seen, 1, colon - 1), partitions }
    local is_over = refusals()
    for _, id in ipairs(cmsgpack.unpack(sub(seen, colon + 1))) do
        local record = redis.call('HGET', KEYS[2], id)
        if record and token_of(record) == token and not is_over(place_of(id, record)) then
            show(reply, #reply, id, record)
        end
    end
    if limit > 0 and #reply == 5 then reply[1] = '1' end -- jobs that became ready since have to be asked for again
    return reply
end

local seen = earlier_answer()
if seen == '' then return { '0', '0', '', '', '' } end
if seen then return again(seen) end

local reply = { '0', string.format('%.0f', now), '', '', partitions }
reply[4] = settle()
local taken = limit > 0 and reserve(reply) or {}
if is_any_gone and #taken == 0 then forget_if_empty(KEYS[2], KEYS[9], KEYS[11]) end
remember(reply[4] .. ':' .. cmsgpack.pack(taken))
return reply
