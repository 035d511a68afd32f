-- Hands out jobs in their order, both jobs with gates and jobs without gates.
local MOST_PARKED = 200 -- jobs that one script parks, in some milliseconds
local FURTHER = 100 -- places that a script reads at a time after the first ones, because it parks jobs
local MOST_CLOSED = 100 -- lines that one script finds closed or empty
local COMPARED = 20 -- keys of a fair limit that are compared; the same as in multiq/backend/limits.py
local closed_count = 0

-- Returns the member of the set `fair_lines` whose key is next, or nil. fair_rank in multiq/backend/limits.py explains the
-- order. The members are sorted by their turns, so of several keys with the same number of leases, the last one is next.
local function next_of_fair(limit)
    local from, to = '[' .. limit, '(' .. limit .. AFTER
    local best = redis.call('ZRANGE', key.fair_lines, from, to, 'BYLEX', 'LIMIT', 0, 1)[1]
    local after = #limit + 12 -- the limit, the priority and the turn
    local fewest = best and leases_at(sub(best, after + 1)) or 0
    if fewest == 0 then return best end
    local members = redis.call('ZRANGE', key.fair_lines, from, to, 'BYLEX', 'LIMIT', 1, COMPARED - 1)
    local priority = sub(best, #limit + 1, #limit + 4)
    for i = 1, #members do
        if sub(members[i], #limit + 1, #limit + 4) ~= priority then break end
        local count = leases_at(sub(members[i], after + 1))
        if count == 0 then return members[i] end
        if count <= fewest then best, fewest = members[i], count end
    end
    return best
end

-- Returns the best of the open lines, its first job, and the priority and sequence with which this job competes with other
-- jobs. All lines of a fair limit compete with the priority and sequence of their oldest first job.
local function best_line()
    while closed_count < MOST_CLOSED do
        local first = redis.call('ZRANGE', key.open_lines, 0, 0, 'WITHSCORES')
        if not first[1] then
            local again, found = reopen, false
            reopen = {}
            for gate in pairs(again) do
                if opens_at(gate) == 0 then
                    look_at(gate)
                    found = true
                else
                    reopen[gate] = true
                end
            end
            if not found then return nil end
        else
            local line, priority, sequence = sub(first[1], 9), tonumber(first[2]), unpacked('>I8', first[1])
            local fair, next_one = is_fair(line), nil
            if fair then
                local limit = limit_of(line)
                next_one = next_of_fair(limit)
                if next_one then line = sub(next_one, #limit + 13) end
            end
            local head, state = head_of(line), state_of(line)
            if not state then
                if next_one then
                    redis.call('ZREM', key.fair_lines, next_one)
                else
                    redis.call('ZREM', key.open_lines, first[1])
                end
                if head then open_line(line) end
                closed_count = closed_count + 1
            elseif not head or sub(state, 9) ~= head.priority .. head.sequence then
                open_line(line)
                closed_count = closed_count + 1
            else
                local closed = closed_one({ line })
                if not closed and fair then closed = closed_one(gates_of(head.record)) end
                if not closed then return line, head, priority, sequence end
                close_line(line, closed, head)
                closed_count = closed_count + 1
            end
        end
    end
    return nil
end

-- Appends up to *limit* jobs to the reply.
local function hand_out_of_lines(reply, limit)
    local taken, fields, leases = {}, {}, {}
    local count, size, bytes, parked = 0, #reply, 0, 0
    local ends_at = {} -- packed ttr -> the lease's end, as text
    local page, records, at, offset, is_last = {}, {}, 1, 0, false

    -- Returns the first place of the ready set whose job can be handed out now. Parks jobs whose gates are closed.
    local function next_ready()
        while parked < MOST_PARKED do
            if at > #page then
                if is_last then return nil end
                local number = offset == 0 and limit or math.max(limit, FURTHER)
                page = redis.call('ZRANGE', key.ready, offset, offset + number - 1)
                offset, is_last, at = offset + #page, #page < number, 1
                if #page == 0 then return nil end
                local ids = {}
                for i = 1, #page do ids[i] = id_in(page[i]) end
                records = redis.call('HMGET', key.jobs, unpack(ids))
            end
            local place, record = page[at], records[at]
            local id = id_in(place)
            local fault = not (record and ends_at[sub(record, 21, 28)] and #place == 28 and #record >= 53)
                and place ~= MARKER and fault_of(place, record)
            if fault then
                set_aside(place, record, fault, KEYS[2], KEYS[3], KEYS[4], KEYS[13])
            elseif record then
                local gates = #record > 53 and flags_of(record) % 2 == 1 and gates_of(record)
                if not gates or #gates == 0 then return place, record end
                if gated_left > 0 and not has_fair_gate(gates) and not closed_one(gates) then return place, record, gates end
                park(id, record, gates)
                parked = parked + 1
            end
            at = at + 1
        end
        return nil
    end

    -- Returns false if the reply is full.
    local function give(id, place, record, gates)
        local flags = flags_of(record)
        local body = flags % 2 == 1 and (redis.call('HGET', key.bodies, id) or '')
        local memo = flags >= 128 and (redis.call('HGET', key.bodies, id .. '\1') or '')
        bytes = bytes + (body and #body or 0) + (memo and #memo or 0)
        if bytes > MOST_BYTES and count > 0 then
            reply[1] = '2'
            return false
        end
        local ttr = sub(record, 21, 28)
        if not ends_at[ttr] then ends_at[ttr] = string.format('%.0f', now + unpacked('>I8', ttr)) end
        record = sub(record, 1, 28) .. u32(count_at(record, 29) + 1) .. sub(record, 33, 41) .. token .. sub(record, 54)
        count = count + 1
        taken[count] = id
        fields[2 * count - 1], fields[2 * count] = id, record
        leases[2 * count - 1], leases[2 * count] = ends_at[ttr], place
        if gates then enter(gates, id, ends_at[ttr]) end
        reply[size + 1], reply[size + 2] = id, record
        size = size + 2
        if body then
            size = size + 1
            reply[size] = body
        end
        if memo then
            size = size + 1
            reply[size] = memo
            if flags >= 196 then
                size = size + 1
                reply[size] = redis.call('HGET', key.bodies, id .. '\2') or ''
            end
        end
        return true
    end

    local has_no_line = false
    while count < limit do
        local place, record, gates = next_ready()
        -- this script looks at no further places, and the job of this place may come before the jobs in the lines
        local unread = not place and parked >= MOST_PARKED and (page[at] or redis.call('ZRANGE', key.ready, offset, offset)[1])
        local has_unread = unread
        if unread and #unread < 12 then unread = nil end -- a later script sets this place aside
        local line, head, priority, sequence
        if is_any_parked and gated_left > 0 and (is_line_opened or not has_no_line) then
            is_line_opened = false
            line, head, priority, sequence = best_line()
            has_no_line = not line
        end
        local other = place or unread
        local own = other and priority_in(other)
        if line and (not other or priority < own or priority == own and sequence < unpacked('>I8', other)) then
            if unread and parks_first and priority == own and is_fair(line) then
                reply[1] = '1' -- the places that were not read may have jobs of other keys
                notify(key.hint) -- if this consumer ends before its next call, another one goes on
                break
            end
            gates = gates_of(head.record)
            local is_elsewhere = has_fair_gate(gates) and not is_fair(line) or closed_one(gates)
            if not is_elsewhere and not give(head.id, place_of(head.id, head.record), head.record, gates) then break end
            redis.call('ZREM', key.lines, head.member)
            redis.call('HDEL', key.parked, head.id)
            heads[line] = nil
            open_line(line, is_fair(line) and next_turn() or nil)
            if is_elsewhere then
                park(head.id, head.record, gates)
                parked = parked + 1
                if parked > MOST_PARKED then
                    reply[1] = '1'
                    break
                end
            end
        elseif place then
            if not give(id_in(place), place, record, gates) then break end
            at = at + 1
        else
            if has_unread then reply[1] = '1' end
            break
        end
    end
    local gone = offset - #page + at - 1 -- all places before the next one, in order
    if gone > 0 then redis.call('ZREMRANGEBYRANK', key.ready, 0, gone - 1) end
    write_parked()
    if count > 0 then
        redis.call('HSET', key.jobs, unpack(fields))
        redis.call('ZADD', key.reserved, unpack(leases))
    end
    if count == 0 and closed_count >= MOST_CLOSED then reply[1] = '1' end
    return taken
end
