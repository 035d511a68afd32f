--- flags: no-writes
-- Read a part of a listing of the parked jobs, gate by gate.
-- KEYS  1 jobs   2 bodies   3 reasons   4 lines
-- ARGV  1 the maximum number of jobs   2 the member of lines after which to begin, or nothing
-- =>    now, then for each job: its member, score 0, record, body or nothing, reason or nothing; and of a job with
--       extras its memo or nothing, and its detail or nothing. If there is no record, the job is gone
--- include record
--- include clock
local reply = { string.format('%.0f', now) }
local from = ARGV[2] == '' and '-' or '(' .. ARGV[2]
for _, member in ipairs(redis.call('ZRANGE', KEYS[4], from, '+', 'BYLEX', 'LIMIT', 0, ARGV[1])) do
    local size = 2 + unpacked('>I2', member)
    size = size + 2 + unpacked('>I2', member, size + 1)
    local id = sub(member, size + 13)
    local record = redis.call('HGET', KEYS[1], id)
    reply[#reply + 1] = member
    reply[#reply + 1] = '0'
    if not record or #record < 53 or sub(record, 17, 20) .. sub(record, 1, 8) ~= sub(member, size + 1, size + 12) then
        for _ = 1, 3 do reply[#reply + 1] = '' end
    else
        local flags = flags_of(record)
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
