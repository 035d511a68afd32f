-- Settles leases.
local on_accepted -- set by scripts that count leases: called with each accepted verdict's job, record and letter

local function with_reason(id, record, reason)
    local had = flags_of(record)
    local flags = had % 2
    if had >= 128 then
        redis.call('HDEL', KEYS[4], id .. '\1') -- the detail
        flags = (had < 196 and 192 or 252) + flags
    end
    if reason ~= '' then
        redis.call('HSET', KEYS[4], id, sub(reason, 2))
        flags = flags + 2
    elseif had >= 2 then
        redis.call('HDEL', KEYS[4], id)
    end
    return sub(record, 1, 40) .. string.char(flags) .. NO_HOLDER .. sub(record, 54)
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

-- By the letter of a verdict: the function that carries out such verdicts. The function returns the record for later
-- verdicts of the same call, or nil if the job is to be deleted. The empty record '' has no token. So after a function
-- has returned '', all later verdicts of the call on the job are refused.
local carry_out = {}

function carry_out.g(id, record, place, delay)
    redis.call('ZREM', KEYS[7], place)
    local attempts = count_at(record, 29) - 1
    record = sub(record, 1, 28) .. u32(attempts) .. sub(record, 33, 41) .. NO_HOLDER .. sub(record, 54)
    redis.call('HSET', KEYS[2], id, record)
    if delay == '' then make_ready(place) else delay_by(tonumber(delay), place) end
    return ''
end

function carry_out.x(id, record, place, reason)
    redis.call('ZREM', KEYS[7], place)
    record = with_reason(id, record, reason)
    local crashes = count_at(record, 33) + 1
    redis.call('HSET', KEYS[2], id, sub(record, 1, 32) .. u32(crashes) .. sub(record, 37))
    make_ready(place)
    return ''
end

function carry_out.t(_, record, place)
    redis.call('ZADD', KEYS[7], 'XX', now + ttr_of(record), place)
    return record
end

function carry_out.b(id, record, place, reason)
    redis.call('ZREM', KEYS[7], place)
    redis.call('HSET', KEYS[2], id, with_reason(id, record, reason))
    redis.call('ZADD', KEYS[8], redis.call('INCR', KEYS[9]), place)
    return ''
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
    return ''
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
    local changed, places, acked, flagged, count = {}, {}, {}, {}, 0
    for i = 1, #ids do
        local id, verdict = ids[i], ARGV[2 * i + 3]
        local record = changed[id] or records[i]
        local place = record and place_of(id, record)
        if not record or sub(record, 42, 53) ~= sub(verdict, 1, 12) or is_over(place) then
            answers[i] = '0'
        else
            answers[i] = '1'
            local kind = sub(verdict, 13, 13)
            if on_accepted then on_accepted(id, record, kind) end
            local later = kind ~= 'a' and carry_out[kind](id, record, place, sub(verdict, 14))
            if not later then
                count = count + 1
                places[count], acked[count] = place, id
                local flags = flags_of(record)
                if flags > 0 then
                    flagged[#flagged + 1] = id
                    if flags >= 128 then
                        flagged[#flagged + 1] = id .. '\1'
                        if flags >= 196 then flagged[#flagged + 1] = id .. '\2' end
                    end
                    if flags % 2 == 1 and #record > 53 then forget_unique(id, record, KEYS[3]) end
                end
            end
            changed[id] = later or ''
        end
    end
    if carry_out.finish then carry_out.finish() end
    forget(places, acked, flagged)
    if became_ready then notify(KEYS[11]) end
    return table.concat(answers)
end

