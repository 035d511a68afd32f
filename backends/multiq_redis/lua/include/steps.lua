-- Carries out steps. The table `key` maps names to keys. Each step is three arguments of the script:
--   a letter, the verdict that the step belongs to (2 bytes: its index from 1, or 0), and details;   an id or a key;   a value
--   a arrive                                             the held job's id   the member
--   e arrive and expect   details: how many, 4 bytes     the held job's id   the member
--   d arrive and doom     details: the reason            the held job's id   nothing
--   q enqueue             details: delay, us (8 bytes), awaits (4 bytes)   the id   the record from the priority on
--   p put                 details: ttl, us (8 bytes), or nothing           the key   the value
--   x drop                                               the key             nothing
--   o outbox              details: group (2 bytes), 1 byte: p if all steps of the group are a, else x
--                         the target: 1 byte, 1 byte, and the name of the partition (see forward)   the step, packed
-- How a note is stored: one field of the notes hash, named by its key, packed big-endian:
--   1-14 version   15-22 expires at, us, or 0   23- value
-- The note's key is also in the note_keys set, where all scores are 0. If the note expires, its key is also in note_expiry,
-- with the time of expiry as the score.
-- The outbox is a sorted set. Each new score is higher than all earlier scores. A member is a group of steps for another slot:
--   1-14 the call's token and the group: the mark   15 p or x   16-17 number of bytes   the target   the steps, packed
-- The outbox contains names of other partitions only as values: this script never uses the keys of another partition.
local INLINE = 1024 -- bytes of the largest body that is kept in its job's record
local BEFORE_BODY = 37 -- bytes of a record from the priority to the body

local carried = 0 -- number of steps so far, which is a part of the versions of notes
local is_refused -- set by the script: returns, for a step's first argument and id, whether the step is not carried out; nil: all steps are carried out
local is_ready = false -- whether a job became ready
local arriving, arriving_ids = {}, {} -- held job's id -> members of its plain arrivals (letter a)
local is_forwarded = false -- whether arrivals were put into the outbox, to look for their jobs elsewhere
local missing = {} -- packed arrivals at jobs that are not in this partition
local groups, group_numbers = {}, {}

-- Fails the script before its first write if a key is of another type, because another program or a newer multiq has written
-- it.
local function check_types()
    for _, name in ipairs({ 'held', 'arrived', 'litter', 'note_keys', 'note_expiry', 'outbox' }) do
        redis.call('ZSCORE', key[name], '')
    end
    redis.call('HGET', key.terms, '')
    redis.call('HGET', key.notes, '')
end

local function packed(text) return pack('>I4', #text) .. text end

local function release(id, record, place, delay)
    redis.call('ZREM', key.held, place)
    forget_terms(id, record)
    if delay > 0 then
        redis.call('ZADD', key.delayed, now + delay, place)
        notify_if_first(key.hint, key.delayed, now + delay)
    else
        redis.call('ZADD', key.ready, priority_in(place), place)
        is_ready = true
    end
end

-- Returns the record, place and terms of a held job, or nil if the job is not held in this partition. In a queue with
-- several partitions, the job may be in another one.
local function find_held(id)
    local record = redis.call('HGET', key.jobs, id)
    if not record then return nil, true end
    local place = place_of(id, record)
    if not redis.call('ZSCORE', key.held, place) then return nil, false end
    return record, place, redis.call('HGET', key.terms, id) or string.rep('\0', 16)
end

-- Counts *count* members as arrived. Also adds *expect* members to the members for which the job waits.
local function count_arrivals(id, record, place, terms, count, expect)
    local awaits, delay = count_at(terms, 1) - count + expect, unpacked('>I8', terms, 9)
    if awaits <= 0 then
        release(id, record, place, delay)
    else
        redis.call('HSET', key.terms, id, u32(awaits) .. u32(count_at(terms, 5) + count) .. sub(terms, 9))
    end
end

-- Carries out the plain arrivals at one held job.
local function arrive_all(id)
    local members = arriving[id]
    if not members then return end
    arriving[id] = nil
    local record, place, terms = find_held(id)
    if not record then
        if place then
            for i = 1, #members do missing[#missing + 1] = packed('a\0\0') .. packed(id) .. packed(members[i]) end
        end
        return
    end
    if count_at(terms, 1) == 1 and count_at(terms, 5) == 0 then -- a chain: it has a single member, so no member has arrived before
        release(id, record, place, unpacked('>I8', terms, 9))
        return
    end
    local head, scored, new = sub(record, 1, 16), {}, 0
    for i = 1, #members do
        scored[#scored + 1] = '0'
        scored[#scored + 1] = head .. members[i]
        if #scored == 4000 or i == #members then
            new = new + redis.call('ZADD', key.arrived, unpack(scored))
            scored = {}
        end
    end
    if new > 0 then count_arrivals(id, record, place, terms, new, 0) end
end

local function arrive_later(id, member)
    local members = arriving[id]
    if not members then
        members = {}
        arriving[id] = members
        arriving_ids[#arriving_ids + 1] = id
    end
    members[#members + 1] = member
end

-- Carries out the plain arrivals at all held jobs.
local function arrive_everywhere()
    for i = 1, #arriving_ids do arrive_all(arriving_ids[i]) end
    arriving_ids = {}
end

local step = {}

function step.e(details, id, member)
    arrive_all(id)
    local record, place, terms = find_held(id)
    if not record then
        if place then missing[#missing + 1] = packed('e\0\0' .. details) .. packed(id) .. packed(member) end
    elseif redis.call('ZADD', key.arrived, '0', sub(record, 1, 16) .. member) == 1 then
        count_arrivals(id, record, place, terms, 1, (unpacked('>I4', details)))
    end
end

-- Stores the reason in the bodies hash, in the field id .. '\2'. The flags in the record say that the reason is there: see
-- include/record.lua.
function step.d(reason, id)
    arrive_all(id)
    local record, place = find_held(id)
    if not record then
        if place then missing[#missing + 1] = packed('d\0\0' .. reason) .. packed(id) .. packed('') end
        return
    end
    release(id, record, place, 0)
    redis.call('HDEL', key.bodies, id .. '\1') -- an older script may have deleted an earlier job of this id, but not its memo
    redis.call('HDEL', key.reasons, id .. '\1')
    redis.call('HSET', key.bodies, id .. '\2', reason)
    redis.call('HSET', key.jobs, id, sub(record, 1, 40) .. string.char(252 + flags_of(record) % 4) .. sub(record, 42))
end

function step.q(details, id, rest)
    arrive_all(id)
    if redis.call('HGET', key.jobs, id) then return end
    local delay, awaits = unpacked('>I8I4', details)
    local head = u64(redis.call('INCR', key.sequence))
    local place = head .. sub(rest, 1, 4) .. id
    if #rest > BEFORE_BODY + INLINE then
        redis.call('HSET', key.bodies, id, sub(rest, BEFORE_BODY + 1))
        rest = sub(rest, 1, 24) .. '\1' .. NO_HOLDER
    end
    redis.call('HSET', key.jobs, id, head .. u64(now) .. rest)
    if awaits > 0 then
        redis.call('HSET', key.terms, id, u32(awaits) .. u32(0) .. u64(delay))
        redis.call('ZADD', key.held, '0', place)
    elseif delay > 0 then
        redis.call('ZADD', key.delayed, now + delay, place)
        notify_if_first(key.hint, key.delayed, now + delay)
    else
        redis.call('ZADD', key.ready, priority_in(place), place)
        is_ready = true
    end
end

local function drop_note(name)
    redis.call('HDEL', key.notes, name)
    redis.call('ZREM', key.note_keys, name)
    redis.call('ZREM', key.note_expiry, name)
end

function step.p(ttl, name, value)
    local expired = redis.call('ZRANGEBYSCORE', key.note_expiry, '-inf', now, 'LIMIT', 0, 2)
    for i = 1, #expired do drop_note(expired[i]) end
    local expires_at = ttl ~= '' and now + unpacked('>I8', ttl) or 0
    redis.call('HSET', key.notes, name, token .. pack('>I2', carried) .. u64(expires_at) .. value)
    redis.call('ZADD', key.note_keys, '0', name)
    if ttl ~= '' then
        redis.call('ZADD', key.note_expiry, expires_at, name)
    else
        redis.call('ZREM', key.note_expiry, name)
    end
end

function step.x(_, name) drop_note(name) end

function step.o(details, target, packed_step)
    local number = unpacked('>I2', details)
    local group = groups[number]
    if not group then
        group = { pack('>I2', number), sub(details, 3), pack('>I2', #target), target }
        groups[number] = group
        group_numbers[#group_numbers + 1] = number
    end
    group[#group + 1] = packed_step
end

local function write_outbox(members)
    if #members == 0 then return end
    local last = redis.call('ZRANGE', key.outbox, -1, -1, 'WITHSCORES')
    local score = math.max(now, last[2] and tonumber(last[2]) + 1 or 0)
    for i = 1, #members do redis.call('ZADD', key.outbox, string.format('%.0f', score + i), members[i]) end
end

-- If an arrival's job is not in this partition, forwards the arrival to the next partition. This ends when all partitions
-- were visited. First comes the partition at which the arrival starts, then partition 0, which stores the number of
-- partitions, then all others. *first* and *count* are the first two bytes of a target. *first* is the partition that was
-- visited first. *count* is the number of partitions, or 0 if it is not known yet.
local function forward(first, count, mark)
    if #missing == 0 then return end
    local name, own = string.match(key.jobs, '{([^{}]*)}:jobs$'), 0
    local queue, number = string.match(name, '^(.*)#(%d+)$')
    if queue then own = tonumber(number) else queue = name end
    if not first then first = own end
    if own == 0 then count = tonumber(redis.call('GET', key.partitions) or '') or 1 end
    local following = own + 1
    if own ~= 0 and count == 0 then following = 0 end
    if following == first then following = following + 1 end
    if following > 0 and following >= count then
        missing = {} -- no partition has the jobs of these arrivals
        return
    end
    local target = string.char(first, count) .. (following == 0 and queue or queue .. '#' .. following)
    -- A group is plain if all its steps are plain arrivals. In a packed step, the letter follows the 4 bytes with the length
    -- of the first part.
    local plain = 'p'
    for i = 1, #missing do plain = sub(missing[i], 5, 5) == 'a' and plain or 'x' end
    write_outbox({ mark .. plain .. pack('>I2', #target) .. target .. table.concat(missing) })
    missing, is_forwarded = {}, true
end

-- Carries out the steps in the arguments *first* to *last*.
local function carry_out_steps(first, last)
    local arguments = ARGUMENTS
    for at = first, last, 3 do
        local head, name = arguments[at], arguments[at + 1]
        carried = carried + 1
        if not is_refused or not is_refused(head, name) then
            local letter = sub(head, 1, 1)
            if letter == 'a' then
                arrive_later(name, arguments[at + 2])
            else
                step[letter](sub(head, 4), name, arguments[at + 2])
            end
        end
    end
    arrive_everywhere()
end

local function finish_steps()
    table.sort(group_numbers)
    local members = {}
    for i = 1, #group_numbers do members[i] = token .. table.concat(groups[group_numbers[i]]) end
    write_outbox(members)
    collect_litter()
    if is_ready then notify(key.hint) end
end
