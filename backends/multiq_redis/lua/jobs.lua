--- flags: no-writes
-- Read a part of a listing.
-- KEYS  1 jobs   2 bodies   3 reasons   4 the state's set   5 terms
-- ARGV  1 the maximum number of jobs
--       2 score and 3 sequence of a job: the listing begins after this job; empty: it begins with the first job
--       4 'due': only jobs that are due now; 'later': only jobs that are due later; 'held': held jobs; empty: all jobs
-- =>    now, then for each job: its place, score (of a held job: how many arrivals it waits for), record, body or nothing,
--       reason or nothing; if the job has extras, then its memo or nothing, and its detail or nothing. If a job cannot be
--       decoded, its record, body and reason are empty.
--- include record
--- include clock
--- include unreadable
-- Finds the rank of the first place after the given place by bisection, because many scores are equal, and the given job may
-- be gone.
local function rank_after(score, sequence)
    local low, high = 0, redis.call('ZCARD', KEYS[4])
    while low < high do
        local middle = math.floor((low + high) / 2)
        local there = redis.call('ZRANGE', KEYS[4], middle, middle, 'WITHSCORES')
        local at = tonumber(there[2])
        if at < score or (at == score and (#there[1] < 8 or struct.unpack('>I8', there[1]) <= sequence)) then
            low = middle + 1
        else
            high = middle
        end
    end
    return low
end

local first = ARGV[2] == '' and 0 or rank_after(tonumber(ARGV[2]), tonumber(ARGV[3]))
local last = first + ARGV[1] - 1
if ARGV[4] == 'due' or ARGV[4] == 'later' then
    local due = redis.call('ZCOUNT', KEYS[4], '-inf', now)
    if ARGV[4] == 'due' then
        last = math.min(last, due - 1)
    elseif first < due then
        first, last = due, due + ARGV[1] - 1
    end
end
local found = last < first and {} or redis.call('ZRANGE', KEYS[4], first, last, 'WITHSCORES')
local reply = { string.format('%.0f', now) }
for i = 1, #found, 2 do
    local id = id_in(found[i])
    local record = redis.call('HGET', KEYS[1], id)
    local terms = record and ARGV[4] == 'held' and redis.call('HGET', KEYS[5], id)
    if terms then found[i + 1] = tostring(count_at(terms, 1)) end
    -- an older multiq may have made a held job ready, and the job then has another place
    if not record or fault_of(found[i], record) or (ARGV[4] == 'held' and place_of(id, record) ~= found[i]) then
        for _, part in ipairs({ found[i], found[i + 1], '', '', '' }) do reply[#reply + 1] = part end
    else
        local flags = flags_of(record)
        reply[#reply + 1] = found[i]
        reply[#reply + 1] = found[i + 1]
        reply[#reply + 1] = record
        reply[#reply + 1] = flags % 2 == 1 and redis.call('HGET', KEYS[2], id) or ''
        reply[#reply + 1] = flags >= 2 and redis.call('HGET', KEYS[3], id)
        if flags >= 128 then
            reply[#reply + 1] = redis.call('HGET', KEYS[2], id .. '\1')
            reply[#reply + 1] = redis.call('HGET', KEYS[3], id .. '\1')
        end
    end
end
return reply
