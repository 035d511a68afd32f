#!lua flags=allow-oom
-- Delete a job that is not reserved.
-- KEYS  1 call   2 jobs   3 bodies   4 reasons   5 ready   6 delayed   7 reserved   8 buried   9 sequence
--       10 hint
-- ARGV  1 number   2 id
-- =>    ok, missing, or reserved: a lease holds it
-- How a job is stored: one field of the queue's jobs hash, named by its id, packed big-endian.
--   1-8  sequence (age)   9-16 enqueued at, us   17-20 priority   21-28 ttr, us
--   29-32 attempts   33-36 crashes   37-40 kicks   41 flags   42-53 token, zeros without a lease   54- body
-- flags: 1 the body is in the bodies hash, 2 there is a reason in the reasons hash.
-- Its place, the member of the sorted set that it is in: sequence, priority, id. So equal scores sort by age.
-- A job keeps its record in all states; the set that holds its place is its state.
local sub = string.sub
local pack, unpacked = struct.pack, struct.unpack
local NOBODY = string.rep('\0', 12)

local function u32(number) return pack('>I4', number) end

local function u64(number) return pack('>I8', number) end

local function place_of(id, record) return sub(record, 1, 8) .. sub(record, 17, 20) .. id end

local function id_in(place) return sub(place, 13) end

local function priority_in(place) return (unpacked('>I4', place, 9)) end

local function token_of(record) return sub(record, 42, 53) end

local function flags_of(record) return string.byte(record, 41) end

local function ttr_of(record) return (unpacked('>I8', record, 21)) end

local function count_at(record, position) return (unpacked('>I4', record, position)) end
-- A call has one effect however often it arrives. KEYS[1] stores the last call of one client: its number and answer.
-- ARGV[1] is the number. A client's numbers ascend, and a client has one call in flight at a time. The same number
-- is a repetition after a lost reply. A smaller number is a late duplicate whose reply no client reads. Neither of them
-- changes anything.
local MEMORY = '300' -- seconds; text, as Redis would have to convert a number
--- before 7.0: redis.call('EXPIRE', KEYS[1], MEMORY)

local function earlier_answer()
    local seen = redis.call('GET', KEYS[1])
    if not seen then return nil end
    local colon = string.find(seen, ':', 1, true)
    local number = tonumber(sub(seen, 1, colon - 1))
    if number < tonumber(ARGV[1]) then return nil end
    if number > tonumber(ARGV[1]) then return '' end
    return sub(seen, colon + 1)
end

local function remember(answer)
    redis.call('SET', KEYS[1], ARGV[1] .. ':' .. answer, 'EX', MEMORY)
    return answer
end
-- Now, by this server's clock, in microseconds: exact in a double until the year 2255.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
-- A job as it stands now. Returns its state and its record, or nil.
-- state: ready, delayed, reserved, buried; a lease that ended, or a due time that has passed, is ready.
local function find(id, jobs, ready, delayed, reserved, buried)
    local record = redis.call('HGET', jobs, id)
    if not record then return nil end
    local place = place_of(id, record)
    for state, set in pairs({ delayed = delayed, reserved = reserved }) do
        local at = redis.call('ZSCORE', set, place)
        if at then
            if tonumber(at) <= now then return 'ready', record, at, set end
            return state, record, at, set
        end
    end
    local at = redis.call('ZSCORE', buried, place)
    if at then return 'buried', record, at, buried end
    return 'ready', record, '0', ready
end
-- Delete the counter and the marker of an empty queue. Without jobs there are no ages to compare and no leases, so the
-- counter may restart. The marker is not needed, because there is nothing to notify a consumer of.
local function forget_if_empty(jobs, sequence, hint)
    if redis.call('EXISTS', jobs) == 0 then redis.call('DEL', sequence, hint) end
end
local seen = earlier_answer()
if seen then return seen end
local state, record, _, set = find(ARGV[2], KEYS[2], KEYS[5], KEYS[6], KEYS[7], KEYS[8])
if not state then return remember('missing') end
if state == 'reserved' then return remember('reserved') end
redis.call('ZREM', set, place_of(ARGV[2], record))
redis.call('HDEL', KEYS[2], ARGV[2])
if flags_of(record) > 0 then
    redis.call('HDEL', KEYS[3], ARGV[2])
    redis.call('HDEL', KEYS[4], ARGV[2])
end
forget_if_empty(KEYS[2], KEYS[9], KEYS[10])
return remember('ok')
