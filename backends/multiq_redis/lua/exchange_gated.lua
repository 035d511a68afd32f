--- flags: allow-oom
-- Like exchange_unique.lua, but for queues that have jobs with gates, and for verdicts on jobs with gates.
-- KEYS  1 call   2 jobs   3 bodies   4 reasons   5 ready   6 delayed   7 reserved   8 buried   9 sequence
--       10 paused   11 hint   12 partitions   13 unreadable   14 outcomes   15 expiring   16 held   17 terms
--       18 arrived   19 litter   20 notes   21 note_keys   22 note_expiry   23 outbox   24 unique_holds
--       25 hold_expiry   26 limits   27 lines   28 parked   29 line_states   30 open_lines   31 fair_lines
--       32 blocked   33 slot_counts   34 slot_ends   35 rates   36 openings   37 slot_ids
-- ARGV  1 the call's number   2 token for the new leases   3 the maximum number of new leases
--       then for each verdict two arguments, as in exchange_after.lua: the job's id; the lease's token, a letter and details
--       then the steps of the verdicts, three arguments each: see include/steps.lua and include/unique_steps.lua
--       then 1 if ready jobs of fair limits are parked before one of them is handed out, otherwise 0
--       then the maximum number of jobs with gates (empty: no maximum), and last the number of verdicts
-- =>    the reply of exchange.lua; the first groups of the outbox: score and member of each; and 1 if jobs are parked
--- include verdicts_and_steps
--- include record
--- include once
--- include clock
--- include notify
--- include unreadable
--- include promote
--- include empty
--- include pause
--- include key_and_gates
--- include refusals

-- When Lua creates a function, it looks up each outer variable that the function uses. If the variable belongs to the
-- directly enclosing function, Lua searches a list. If the variable belongs to a function further out, Lua needs no
-- search. Many variables of this script belong to its main function, so functions inside `run` are created faster.
local function run()
local key = {
    jobs = KEYS[2], bodies = KEYS[3], ready = KEYS[5], delayed = KEYS[6], reserved = KEYS[7], hint = KEYS[11],
    limits = KEYS[26], lines = KEYS[27], parked = KEYS[28], line_states = KEYS[29], open_lines = KEYS[30],
    fair_lines = KEYS[31], blocked = KEYS[32], slot_counts = KEYS[33], slot_ends = KEYS[34], rates = KEYS[35],
    openings = KEYS[36], slot_ids = KEYS[37],
}
local gated_left = tonumber(ARGUMENTS[#ARGUMENTS - 1]) or math.huge
local parks_first = ARGUMENTS[#ARGUMENTS - 2] == '1'
-- Leases that verdicts have ended (include/slot_entries.lua): their entries, if they are not in groups; the group in which each
-- may be -> the number of such leases; and gate -> minus the number of its leases
local ended_slots, ended_groups, freed = {}, {}, {}
local is_any_parked -- whether jobs are parked, or were parked before this call; nil: not known
local is_any_gone = false
local has_ended = false -- whether the lease of a counted slot has ended

-- To create a function takes time, and more time if it uses more variables of the enclosing function. So the functions for
-- verdicts, for steps and for lines are created only in the calls that need them.
--- include open_gates

local function settle_verdicts()
--- include settle
    on_accepted = function(id, record, letter)
        if not has_gates(record) then return end
        local gates, lease_token = gates_of(record), token_of(record)
        for i = 1, #gates do
            local gate = gates[i]
            if letter == 't' or letter == 'T' then
                local ends_at = string.format('%.0f', now + ttr_of(record))
                redis.call('ZADD', key.slot_ends, 'XX', ends_at, gate .. id)
                redis.call('ZADD', key.slot_ends, 'XX', 'LT', ends_at, gate .. lease_token) -- earlier if a clock was set back
            else
                local group = gate .. lease_token
                ended_slots[#ended_slots + 1] = gate .. id
                ended_groups[group] = (ended_groups[group] or 0) + 1
                freed[gate] = (freed[gate] or 0) - 1
            end
        end
    end

    for i = 5, #ARGV, 2 do
        if string.byte(ARGV[i], 13) < 97 then -- a capital letter
--- include outcomes
local KEEPS_OUTCOMES = true
--- include keep
            break
        end
    end

    local LAST_STEP = #ARGUMENTS - 3
    if LAST_STEP >= FIRST_STEP then
        local more_keys = {
            reasons = KEYS[4], buried = KEYS[8], sequence = KEYS[9], partitions = KEYS[12], held = KEYS[16],
            terms = KEYS[17], arrived = KEYS[18], litter = KEYS[19], notes = KEYS[20], note_keys = KEYS[21],
            note_expiry = KEYS[22], outbox = KEYS[23], unique_holds = KEYS[24], hold_expiry = KEYS[25],
        }
        for name, own in pairs(more_keys) do key[name] = own end
--- include holds
--- include steps
--- include unique
--- include parked
--- include add
--- include unique_steps
--- include settle_in_order
        return settle(), is_any_gone
    end
    return settle(), is_any_gone
end

local function settle()
    -- Fails before the first write if a key is of another type. While no job is parked, most of these keys do not exist.
    is_any_parked = false
    if redis.call('EXISTS', key.parked, key.lines, key.line_states, key.open_lines, key.fair_lines, key.blocked) > 0 then
        for _, name in ipairs({ 'lines', 'open_lines', 'fair_lines', 'blocked' }) do redis.call('ZSCORE', key[name], '') end
        for _, name in ipairs({ 'line_states', 'parked' }) do redis.call('HGET', key[name], '') end
        is_any_parked = redis.call('EXISTS', key.parked) == 1
    end
    redis.call('HGET', key.slot_counts, '')
    redis.call('HGET', key.slot_ids, '')
    redis.call('ZSCORE', key.openings, '')
    has_ended = redis.call('ZCOUNT', key.slot_ends, '-inf', now) > 0
    if #ARGV == 3 then return '' end -- a reserve reads the other keys before it writes
    redis.call('ZSCORE', key.rates, '')
    redis.call('HGET', key.limits, '')
    local answers
    answers, is_any_gone = settle_verdicts()
    return answers
end

--- include reserve
--- include slot_counts
--- include slots
local hand_out_plain = hand_out
local is_handed_out = false
local is_line_opened = false -- whether a reserve may hand out jobs of a line

-- Frees the slots of settled leases. Then hands out up to *most* jobs, and sets the marker of include/parked.lua.
hand_out = function(reply, most)
    is_handed_out, most = true, most or limit
    local needs_lines = has_ended and most > 0
    if #ended_slots > 0 then
--- include free_settled
        if not free_settled() then
--- include slot_entries
--- include count_again
--- include live_slots
--- include divide
            for group in pairs(ended_groups) do
                if redis.call('HGET', key.slot_counts, group) then divide(group, parts_of(group)) end
            end
            count_again()
            needs_lines = true
        end
        for gate in pairs(is_any_parked and freed or {}) do
            local from, to = '[' .. gate, '(' .. gate .. AFTER
            needs_lines = needs_lines or redis.call('ZLEXCOUNT', key.lines, from, to) > 0
                or redis.call('ZLEXCOUNT', key.blocked, from, to) > 0
        end
    end
    if is_any_parked and most > 0 and not needs_lines then
        needs_lines = redis.call('ZCOUNT', key.openings, '-inf', now) > 0 or redis.call('EXISTS', key.open_lines) == 1
    end
    local taken = most > 0 and not needs_lines and hand_out_plain(reply) or {}
    if reply[1] == '3' then -- the next place has a job that must be parked, or the marker
        reply[1], needs_lines = '0', true
    end
    if is_any_parked and not needs_lines then
        -- The marker stays where it is if it is due before the first of the new leases ends. A marker that is due too
        -- early only causes a call that sets it again.
        local marker = NO_PLACE .. string.rep('\0', 16)
        local at = redis.call('ZSCORE', key.delayed, marker) or redis.call('ZSCORE', key.ready, marker)
        needs_lines = not at or tonumber(at) > first_end
    end
    if needs_lines then
--- include parked
--- include slot_entries
--- include count_again
--- include live_slots
--- include divide
--- include lines
--- include parked_marker
--- include hand_out_gated
        if is_any_parked then
            for gate in pairs(freed) do look_at(gate) end
        end
        if most > #taken and reply[1] ~= '2' then
            local has_more = has_ended and free_ended()
            if has_more or is_any_parked and open_in_time() then reply[1] = '1' end
            -- A job whose ended lease still has an entry must not get another one.
            local more = has_more and {} or hand_out_of_lines(reply, most - #taken)
            for i = 1, #more do taken[#taken + 1] = more[i] end
        end
        look_again()
        set_marker(first_end)
    end
    local groups = write_leases()
    if groups then
--- include slot_entries
--- include join_groups
--- include count_again
        join_groups(groups)
        count_again()
    end
    return taken
end

local function exchange()
--- include exchange
end

local result = exchange()
local groups, is_parked = {}, '0'
if result[2] ~= '0' then
    if not is_handed_out then hand_out(result, 0) end -- no job was to be handed out, or the queue is paused
    if #result == 5 and redis.call('EXISTS', key.jobs) == 0 then
--- include forget_lines
        forget_lines()
        local marker = NO_PLACE .. string.rep('\0', 16)
        redis.call('ZREM', key.ready, marker)
        redis.call('ZREM', key.delayed, marker)
    end
    if is_line_opened and redis.call('EXISTS', key.open_lines) == 1 then notify(key.hint) end
    -- This consumer has taken its maximum of jobs with gates. It may have popped the notification of such a
    -- job. So it notifies another consumer, but at most ten times a second, because it may pop this notification itself.
    if limit > 0 and #result == 5 and gated_left == 0 and redis.call('EXISTS', key.open_lines) == 1 then
        local last = tonumber(redis.call('HGET', key.line_states, 'n') or 0)
        if now - last > 100000 then
            redis.call('HSET', key.line_states, 'n', string.format('%.0f', now))
            notify(key.hint)
        end
    end
    if is_any_parked ~= false then is_parked = tostring(redis.call('EXISTS', key.parked)) end
    if #ARGUMENTS - 3 >= FIRST_STEP then
        key.outbox = KEYS[23]
--- include outbox
        groups = first_of_outbox()
    end
end
return { result, groups, is_parked }
end

return run()
