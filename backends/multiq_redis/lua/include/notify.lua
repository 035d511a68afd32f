-- A notification is a marker that a waiting consumer pops (BZPOPMIN). The marker has no job. The consumer polls then.
-- Waiting consumers also poll every few seconds. A consumer has to be notified of jobs that are due within HORIZON.
local HORIZON = 6000000 -- us, more than multiq_redis.consumer waits in one go

local function notify(hint) redis.call('ZADD', hint, '0', '1') end

-- A score as a time; nil for an infinite one, which only another program writes.
local function finite(at) return at < math.huge and at or nil end

-- When a set's first place has its time, or nil if it is empty.
local function first_at(set)
    local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
    return first[2] and finite(tonumber(first[2]))
end

-- To be called after jobs were added to the delayed set, the earliest of them due at *due_at*.
local function notify_if_first(hint, delayed, due_at)
    if due_at < now + HORIZON and first_at(delayed) == due_at then notify(hint) end
end
