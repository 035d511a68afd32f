--- flags: none
-- Add jobs in their order. If a job with the same id exists already, it stays as it is. At maxmemory, the server refuses the
-- whole script.
-- KEYS  1 call   2 jobs   3 bodies   4 sequence   5 ready   6 delayed   7 hint
-- ARGV  1 the call's number   2 delays in us, 8 bytes each, or nothing if there are none
--       then for each job: its id, and its record from the priority on
-- =>    ok
--- include record
--- include once
if earlier_answer() then return 'ok' end
--- include clock
--- include many
--- include notify
local INLINE = 1024 -- bytes of the largest body that is kept in its job's record
local BEFORE_BODY = 37 -- bytes of a record from the priority to the body

local arguments = ARGV -- a global is looked up each time
local delays = arguments[2] ~= '' and arguments[2]

local ids = {}
for i = 1, (#arguments - 2) / 2 do ids[i] = arguments[2 * i + 1] end
local held = many_got('HMGET', KEYS[2], ids)
local fresh, count = {}, 0
for i = 1, #ids do
    if not held[i] then
        count = count + 1
        fresh[count] = i
    end
end
if count == 0 then return remember('ok') end

local sequence = redis.call('INCRBY', KEYS[4], count) - count
local enqueued_at = u64(now)
local fields, ready, delayed, bodies = {}, {}, {}, {}
local ready_count, due_first = 0, nil
local packed_priority, priority -- of the previous job, because most jobs have the same priority
for n = 1, count do
    local i = fresh[n]
    local id, rest = ids[i], arguments[2 * i + 2]
    local head, its_priority = pack('>I8', sequence + n), sub(rest, 1, 4)
    local place = head .. its_priority .. id
    if #rest > BEFORE_BODY + INLINE then
        bodies[#bodies + 1] = id
        bodies[#bodies + 1] = sub(rest, BEFORE_BODY + 1)
        rest = sub(rest, 1, 24) .. '\1' .. NO_HOLDER
    end
    fields[2 * n - 1], fields[2 * n] = id, head .. enqueued_at .. rest
    local delay = delays and unpacked('>I8', delays, 8 * i - 7) or 0
    if delay > 0 then
        delayed[#delayed + 1] = now + delay
        delayed[#delayed + 1] = place
        due_first = math.min(due_first or now + delay, now + delay)
    else
        if its_priority ~= packed_priority then
            packed_priority, priority = its_priority, priority_in(place)
        end
        ready[ready_count + 1], ready[ready_count + 2] = priority, place
        ready_count = ready_count + 2
    end
end
many('HSET', KEYS[2], fields)
many('HSET', KEYS[3], bodies)
many('ZADD', KEYS[5], ready)
many('ZADD', KEYS[6], delayed)
if ready_count > 0 then
    notify(KEYS[7])
elseif due_first then
    notify_if_first(KEYS[7], KEYS[6], due_first)
end
return remember('ok')
