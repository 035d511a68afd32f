-- A notification is a marker that a waiting consumer pops (BZPOPMIN). The marker names no job, so the consumer polls after
-- it has popped the marker. Waiting consumers also poll every few seconds. So they must be notified only of jobs that are
-- due within HORIZON.
local HORIZON = 6000000 -- us, longer than a single wait of multiq_redis.consumer

local function notify(hint) redis.call('ZADD', hint, '0', '1') end

-- Returns a score as a time, or nil if the score is infinite. Only another program writes an infinite score.
local function finite(at) return at < math.huge and at or nil end

-- Returns the score of a set's first place as a time, or nil if the set is empty.
local function first_at(set)
    local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
    return first[2] and finite(tonumber(first[2]))
end

-- Call this function after jobs were added to the delayed set. *due_at* is the due time of the earliest of these jobs.
local function notify_if_first(hint, delayed, due_at)
    if due_at < now + HORIZON and first_at(delayed) == due_at then notify(hint) end
end
