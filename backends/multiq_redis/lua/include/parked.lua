-- A job that waits at a gate is parked. Its state is ready, but it is not in the ready set and not in the set of any other
-- state. The table `key` maps names to keys. The hash `parked` maps the id of each parked job to the line
-- in which the job waits. A line is named by its gate, packed as in the record. The set `lines` has a member for each
-- parked job: the gate, followed by the job's priority, sequence and id. While jobs are parked, the ready set or the
-- delayed set has a marker: a place with an id that no job has. If a script that does not look at gates finds this
-- marker, it knows that there are parked jobs.
local MARKER_ID = '\128' .. string.rep('\0', 16)
local MARKER = string.rep('\0', 12) .. MARKER_ID
local NOT_SOON = 315360000000000 -- us, ten years

local function line_member(line, id, record) return line .. sub(record, 17, 20) .. sub(record, 1, 8) .. id end

-- No job is parked any more, so no line has a turn, and no gate needs to be looked at. If the script's user may not use DEL,
-- the keys stay, and reserves correct them. An error would leave a job that this script has taken out of its line nowhere.
local function forget_turns()
    redis.pcall('DEL', key.line_states, key.open_lines, key.fair_lines, key.blocked, key.openings)
end

local function drop_marker()
    redis.call('ZREM', key.ready, MARKER)
    redis.call('ZREM', key.delayed, MARKER)
end

-- Takes a job out of its line, if the job is parked. The next reserve checks the line, because the line's next job may have
-- other gates.
local function unpark(id, record)
    local line = redis.call('HGET', key.parked, id)
    if not line then return end
    redis.call('ZREM', key.lines, line_member(line, id, record))
    redis.call('HDEL', key.parked, id)
    drop_marker()
    if redis.call('EXISTS', key.parked) == 1 then
        redis.call('ZADD', key.openings, string.format('%.0f', now), line)
        redis.call('ZADD', key.ready, '0', MARKER)
        redis.call('ZADD', key.hint, '0', '1')
    else
        forget_turns()
    end
end
