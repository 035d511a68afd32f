-- Checks that a job is stored in multiq's format. A job in another format could make the script fail, or could be leased and
-- never settled. So such a job is moved to the hash `unreadable`. The name of the field there is the job's id, or its place
-- if it has no id. The value is the reason, a newline, and the stored data.
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

-- Returns what is wrong with a place, or with the record of its job if the record is given. Returns nil if nothing is wrong.
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

-- The caller removes the place from its set.
local function set_aside(place, record, why, jobs, bodies, reasons, unreadable)
    local id = id_in(place)
    local stored = (record or redis.call('HGET', jobs, id) or '') .. (redis.call('HGET', bodies, id) or '')
    redis.call('HSET', unreadable, id ~= '' and id or place, why .. '\n' .. stored)
    redis.call('HDEL', jobs, id)
    redis.call('HDEL', bodies, id, id .. '\1', id .. '\2')
    redis.call('HDEL', reasons, id, id .. '\1')
end
