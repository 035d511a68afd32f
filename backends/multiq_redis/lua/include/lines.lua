-- The lines of jobs that wait at gates.
-- A line is open if its gate may be open. Reserves look only at open lines.
-- line_states: hash, gate of a line -> its turn (8 bytes), and of an open line priority and sequence of its first job
-- open_lines: set of sequence and gate of each open line; the score is the priority of its first job
-- fair_lines: set of limit, priority, turn and gate of each open line of a fair limit, all with the score 0
-- blocked: set of a closed gate, priority, turn and gate of each fair line whose first job waits for the closed gate
local NO_TURN = string.rep('\0', 8) -- for a line of a limit that is not fair
local REOPENED = 20 -- blocked lines that are checked together
local MOST_OPENED = 150 -- lines that one script opens, in some milliseconds
local MOST_ENDED = 500 -- leases that one script checks, in some milliseconds

local reopen = {} -- gates with more blocked lines
local opened_count = 0
local to_lines, to_parked = {}, {} -- entries of jobs that are parked, to be written together
local known_lines = {} -- closed lines whose opening is written
local states, heads = {}, {} -- what this script has read: line -> its state or false; line -> its first job

local function state_of(line)
    if states[line] == nil then states[line] = redis.call('HGET', key.line_states, line) end
    return states[line]
end

local function set_state(line, state)
    if state then redis.call('HSET', key.line_states, line, state) else redis.call('HDEL', key.line_states, line) end
    states[line] = state
end

local function write_parked()
    if #to_lines == 0 then return end
    redis.call('ZADD', key.lines, unpack(to_lines))
    redis.call('HSET', key.parked, unpack(to_parked))
    to_lines, to_parked = {}, {}
end

-- Returns the first job of a line, or nil. If an older client has moved a job out of the line, drops the job's entry.
local function head_of(line)
    if heads[line] then return heads[line] end
    write_parked()
    while true do
        local member = redis.call('ZRANGE', key.lines, '[' .. line, '(' .. line .. AFTER, 'BYLEX', 'LIMIT', 0, 1)[1]
        if not member then return nil end
        local at = #line
        local head = {
            member = member, priority = sub(member, at + 1, at + 4), sequence = sub(member, at + 5, at + 12),
            id = sub(member, at + 13),
        }
        head.record = redis.call('HGET', key.jobs, head.id)
        local is_here = redis.call('HGET', key.parked, head.id) == line
        if is_here and head.record and line_member(line, head.id, head.record) == member then
            heads[line] = head
            return head
        end
        redis.call('ZREM', key.lines, member)
        if is_here and not (head.record and redis.call('ZSCORE', key.lines, line_member(line, head.id, head.record))) then
            redis.call('HDEL', key.parked, head.id)
        end
    end
end

local function forget_open(line, state)
    if #state < 20 then return end
    redis.call('ZREM', key.open_lines, sub(state, 13, 20) .. line)
    redis.call('ZREM', key.fair_lines, limit_of(line) .. sub(state, 9, 12) .. sub(state, 1, 8) .. line)
end

local last_turn

local function next_turn()
    last_turn = (last_turn or tonumber(redis.call('HGET', key.line_states, '') or 0)) + 1
    redis.call('HSET', key.line_states, '', string.format('%.0f', last_turn))
    return u64(last_turn)
end

-- Opens a line, so that reserves look at it. *turn*: the line's new turn, if it changes. Returns the line's first job.
local function open_line(line, turn)
    opened_count = opened_count + 1
    local state, head = state_of(line), head_of(line)
    if not head then
        if state then
            forget_open(line, state)
            set_state(line, false)
            known_lines[line] = nil
        end
        return nil
    end
    local fair = is_fair(line)
    local old_turn = state and sub(state, 1, 8)
    if fair and old_turn == NO_TURN then old_turn = nil end -- the limit has become fair
    local new = (turn or old_turn or fair and next_turn() or NO_TURN) .. head.priority .. head.sequence
    if new ~= state then
        if state then forget_open(line, state) end
        set_state(line, new)
        redis.call('ZADD', key.open_lines, unpacked('>I4', head.priority), head.sequence .. line)
        if fair then
            redis.call('ZADD', key.fair_lines, '0', limit_of(line) .. head.priority .. sub(new, 1, 8) .. line)
        end
        is_line_opened = true
    end
    return head
end

-- Blocks a line. *closed*: a gate of the line's first job. Reserves do not look at the line until this gate may be open.
local function close_line(line, closed, head)
    local state = state_of(line)
    if state then
        forget_open(line, state)
        set_state(line, sub(state, 1, 8))
        if closed ~= line then
            redis.call('ZADD', key.blocked, '0', closed .. head.priority .. sub(state, 1, 8) .. line)
        end
    end
    local at = opens_at(closed)
    if at < math.huge then redis.call('ZADD', key.openings, string.format('%.0f', at), closed) end
end

-- Lets the next reserve look at the lines that wait for a gate.
local function look_at(gate)
    open_line(gate)
    local found = redis.call('ZRANGE', key.blocked, '[' .. gate, '(' .. gate .. AFTER, 'BYLEX', 'LIMIT', 0, REOPENED)
    if #found == 0 then return end
    redis.call('ZREM', key.blocked, unpack(found))
    for i = 1, #found do open_line(sub(found[i], #gate + 13)) end
    if #found == REOPENED then reopen[gate] = true end
end

-- Lets a later reserve look at the other lines that these gates have blocked: the next reserve if the gate is open, or a
-- reserve at the time at which the rate opens the gate. A gate without a free slot is looked at when a lease ends.
local function look_again()
    for gate in pairs(reopen) do
        local at = opens_at(gate)
        if at < math.huge then redis.call('ZADD', key.openings, string.format('%.0f', math.max(at, now)), gate) end
    end
    reopen = {}
end

-- Puts a ready job into the line of its first fair gate. If no gate is fair, puts it into the line of its first closed gate.
-- If no gate is closed, puts it into the line of its first gate.
local function park(id, record, gates)
    local line, rank
    for i = 1, #gates do
        local own = (is_fair(gates[i]) and 0 or 2) + (opens_at(gates[i]) == 0 and 1 or 0)
        if not rank or own < rank or own == rank and gates[i] < line then line, rank = gates[i], own end
    end
    local size = #to_lines
    is_any_parked = true
    to_lines[size + 1], to_lines[size + 2] = '0', line_member(line, id, record)
    to_parked[size + 1], to_parked[size + 2] = id, line
    if rank == 2 then
        heads[line] = nil
        if known_lines[line] then return end
        known_lines[line] = true
        if not state_of(line) then set_state(line, NO_TURN) end
        local at = opens_at(line)
        if at < math.huge then redis.call('ZADD', key.openings, string.format('%.0f', at), line) end
    else
        -- An open line changes only if the job becomes its first one.
        local state = state_of(line)
        if state and #state == 20 then
            local priority, sequence = unpacked('>I4I8', state, 9)
            local own = count_at(record, 17)
            if priority < own or priority == own and sequence < unpacked('>I8', record) then return end
        end
        heads[line] = nil
        open_line(line)
    end
end

-- In a set whose members begin with a gate, calls a function with each gate of a limit that comes after *after*. If the
-- script has opened many lines, it stops, and the next reserve opens the others.
local function sweep(limit, letter, after)
    local set, work = letter == 'l' and key.lines or key.blocked, letter == 'l' and open_line or look_at
    local from = after == '' and '[' .. limit or '(' .. after .. AFTER
    while true do
        local member = redis.call('ZRANGE', set, from, '(' .. limit .. AFTER, 'BYLEX', 'LIMIT', 0, 1)[1]
        if not member then return end
        if opened_count >= MOST_OPENED then
            redis.call('ZADD', key.openings, string.format('%.0f', now), limit .. '\255' .. letter .. after)
            return
        end
        after = sub(member, 1, #limit + 2 + unpacked('>I2', member, #limit + 1))
        work(after)
        from = '(' .. after .. AFTER
    end
end

-- Returns whether a job has a gate now. A job that was replaced, or a new job with an old id, may have other gates.
local function has_gate(record, gate)
    for _, own in ipairs(has_gates(record) and gates_of(record) or {}) do
        if own == gate then return true end
    end
    return false
end

-- Frees the slots of leases that have ended. Returns true if there may be more of them.
local function free_ended()
    local ended, examined = redis.call('ZRANGEBYSCORE', key.slot_ends, '-inf', now, 'LIMIT', 0, MOST_ENDED), 0
    for i = 1, #ended do
        if opened_count >= MOST_OPENED or examined >= MOST_ENDED then return true end
        local gate, rest = parts_of(ended[i])
        local number, is_right = 1, true
        if #rest == TOKEN_SIZE then
            examined = examined + #ids_of(ended[i])
            number, is_right = divide(ended[i], gate, rest)
        else
            local record = redis.call('HGET', key.jobs, rest)
            local ends_at = record and has_gate(record, gate) and redis.call('ZSCORE', key.reserved, place_of(rest, record))
            examined = examined + 1
            if ends_at and tonumber(ends_at) > now and not redis.call('HGET', key.slot_counts, gate .. token_of(record)) then
                redis.call('ZADD', key.slot_ends, ends_at, ended[i]) -- an older worker has touched it
                number = 0
            else -- the lease has ended, or an older worker has settled it, and the job's present lease is in a group
                is_right = redis.call('ZREM', key.slot_ends, ended[i]) == 1
                is_right = change_numbers({ [gate] = -1 }) and is_right
            end
        end
        if not is_right then
            count_again() -- once in a call: it may take long
            used = {}
        end
        if number > 0 then
            used[gate] = nil
            if is_any_parked then look_at(gate) end
        end
        if not is_right then return true end
    end
    return #ended == MOST_ENDED
end

local function open_in_time()
    local gates = redis.call('ZRANGEBYSCORE', key.openings, '-inf', now, 'LIMIT', 0, MOST_OPENED)
    for i = 1, #gates do
        if opened_count >= MOST_OPENED then return true end
        local gate = gates[i]
        redis.call('ZREM', key.openings, gate)
        local size = 2 + unpacked('>I2', gate)
        if sub(gate, size + 1, size + 1) == '\255' then
            sweep(sub(gate, 1, size), sub(gate, size + 2, size + 2), sub(gate, size + 3))
        else
            look_at(gate)
        end
    end
    return #gates == MOST_OPENED or opened_count >= MOST_OPENED
end
