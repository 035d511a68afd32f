#!lua flags=allow-oom
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
-- How a job is stored: one field of the queue's jobs hash, named by its id, packed big-endian.
--   1-8  sequence (age)   9-16 enqueued at, us   17-20 priority   21-28 ttr, us
--   29-32 attempts   33-36 crashes   37-40 kicks   41 flags   42-53 token, zeros without a lease   54- body
-- flags: 1 the body is in the bodies hash, 2 there is a reason in the reasons hash.
-- Its place, the member of the sorted set that it is in: sequence, priority, id. So equal scores sort by age.
-- A job keeps its record in all states; the set that holds its place is its state.
local sub = string.sub
local pack, unpacked = struct.pack, struct.unpack
local NOBODY = string.rep('\0', 12)

local function u32(number) return pack('>I4', number) end

local function u64(number) return pack('>I8', number) end

local function place_of(id, record) return sub(record, 1, 8) .. sub(record, 17, 20) .. id end

local function id_in(place) return sub(place, 13) end

local function priority_in(place) return (unpacked('>I4', place, 9)) end

local function token_of(record) return sub(record, 42, 53) end

local function flags_of(record) return string.byte(record, 41) end

local function ttr_of(record) return (unpacked('>I8', record, 21)) end

local function count_at(record, position) return (unpacked('>I4', record, position)) end
-- A call has one effect however often it arrives. KEYS[1] stores the last call of one client: its number and answer.
-- ARGV[1] is the number. A client's numbers ascend, and a client has one call in flight at a time. The same number
-- is a repetition after a lost reply. A smaller number is a late duplicate whose reply no client reads. Neither of them
-- changes anything.
local MEMORY = '300' -- seconds; text, as Redis would have to convert a number
--- before 7.0: redis.call('EXPIRE', KEYS[1], MEMORY)

local function earlier_answer()
    local seen = redis.call('GET', KEYS[1])
    if not seen then return nil end
    local colon = string.find(seen, ':', 1, true)
    local number = tonumber(sub(seen, 1, colon - 1))
    if number < tonumber(ARGV[1]) then return nil end
    if number > tonumber(ARGV[1]) then return '' end
    return sub(seen, colon + 1)
end

local function remember(answer)
    redis.call('SET', KEYS[1], ARGV[1] .. ':' .. answer, 'EX', MEMORY)
    return answer
end
-- Now, by this server's clock, in microseconds: exact in a double until the year 2255.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
-- A notification is a marker that a waiting consumer pops (BZPOPMIN). The marker has no job. The consumer polls then.
-- Waiting consumers also poll every few seconds. A consumer has to be notified of jobs that are due within HORIZON.
local HORIZON = 6000000 -- us, more than multiq_redis.consumer waits in one go

local function notify(hint) redis.call('ZADD', hint, '0', '1') end

-- A score as a time; nil for an infinite one, which only another program writes.
local function finite(at) return at < math.huge and at or nil end

-- When a set's first place has its time, or nil if it is empty.
local function first_at(set)
    local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
    return first[2] and finite(tonumber(first[2]))
end

-- To be called after jobs were added to the delayed set, the earliest of them due at *due_at*.
local function notify_if_first(hint, delayed, due_at)
    if due_at < now + HORIZON and first_at(delayed) == due_at then notify(hint) end
end
-- Whether a job is stored as multiq stores jobs. Any other job would end the script, or be leased and never settled.
-- Such a job is moved to the hash `unreadable`. There its id (or, without an id, its place) maps to the reason, a
-- newline, and the stored data.
local LONGEST_TTR = 3153600000000000 -- us, a century

local function is_utf8(text)
    local at, size = 1, #text
    while at <= size do
        local lead = string.byte(text, at)
        local more = lead < 0x80 and 0 or lead >= 0xC2 and lead < 0xE0 and 1 or lead >= 0xE0 and lead < 0xF0 and 2
            or lead >= 0xF0 and lead < 0xF5 and 3
        if not more then return false end
        for i = at + 1, at + more do
            local byte = string.byte(text, i)
            if not byte or byte < 0x80 or byte > 0xBF then return false end
        end
        local second = more > 1 and string.byte(text, at + 1)
        if lead == 0xE0 and second < 0xA0 or lead == 0xF0 and second < 0x90 or lead == 0xF4 and second > 0x8F then
            return false
        end
        at = at + more + 1
    end
    return true
end

-- What is wrong with a place and, if it is given, with its job's record; or nil.
local function fault_of(place, record)
    if #place ~= 28 then -- an id in 16 bytes
        if #place < 28 then return 'its place is too short' end
        local text = string.match(place, '^(.-)\128%z*$', 13)
        if not text then return 'its id has no end mark' end
        if string.find(text, '[\128-\255]') and not is_utf8(text) then return 'its id is not UTF-8' end
    end
    if record then
        if #record < 53 then return 'its record is too short' end
        local ttr = unpacked('>I8', record, 21)
        if ttr < 1 or ttr > LONGEST_TTR then return 'its ttr is out of range' end
    end
    return nil
end

-- The place itself is taken out of its set by the caller.
local function set_aside(place, record, why, jobs, bodies, reasons, unreadable)
    local id = id_in(place)
    local stored = (record or redis.call('HGET', jobs, id) or '') .. (redis.call('HGET', bodies, id) or '')
    redis.call('HSET', unreadable, id ~= '' and id or place, why .. '\n' .. stored)
    redis.call('HDEL', jobs, id)
    redis.call('HDEL', bodies, id)
    redis.call('HDEL', reasons, id)
end
-- Makes a slice of the due jobs ready. A lease that has ended counts as a crash. Returns true if there may be more.
-- The removals come first, because they are allowed at maxmemory. On Redis 6.2 they allow the rest of the script, too.
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
            fields[#fields + 1] = sub(record, 1, 32) .. u32(count_at(record, 33) + 1) .. sub(record, 37, 41) .. NOBODY
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
-- Delete the counter and the marker of an empty queue. Without jobs there are no ages to compare and no leases, so the
-- counter may restart. The marker is not needed, because there is nothing to notify a consumer of.
local function forget_if_empty(jobs, sequence, hint)
    if redis.call('EXISTS', jobs) == 0 then redis.call('DEL', sequence, hint) end
end
-- When a queue's pause ends; 0 if there is none, or if something else is stored, which only another program writes.
local function pause_end(paused)
    local at = tonumber(redis.call('GET', paused) or 0) or 0
    return at > 0 and at < 2 ^ 63 and at or 0
end

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
