-- The bell: a marker that a sleeping consumer pops (BZPOPMIN). It carries no job and says only: look again.
-- Sleepers look for themselves every few seconds; what changes within the horizon has to be told to one of them.
local HORIZON = 6000000 -- us, more than multiq_redis.consumer sleeps in one go

local function ring(hint) redis.call('ZADD', hint, '0', '1') end

-- A time as it is told; none for an infinite score, which only another program writes.
local function finite(at) return at < math.huge and at or nil end

-- When a set's first place has its time, or nil if it is empty.
local function first_at(set)
    local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
    return first[2] and finite(tonumber(first[2]))
end

-- To be called after jobs were added to the delayed set, the earliest of them due at *due_at*.
local function ring_if_first(hint, delayed, due_at)
    if due_at < now + HORIZON and first_at(delayed) == due_at then ring(hint) end
end
