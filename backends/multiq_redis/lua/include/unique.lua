-- The next enqueue with a unique key decides whether a job still has this key. The decision depends on the job's state
-- (docs/decisions/0078). The table `key` maps names to keys. A key that is held by time is a field of the hash
-- unique_holds:
--   1-8 held until, us   9- the id of the job that took it
-- The key is also in the set hold_expiry. Its score is the time until which the key is held.
local HOLDS_DROPPED = 2 -- how many expired keys each taken key deletes: more than one, so that their number falls

-- Returns the id of the job that has a key, and the job's record, or nil if no job has the key. If the key is only held by
-- time, there is no record.
local function owner_of(unique_key)
    local id = redis.call('HGET', key.bodies, unique_field(unique_key))
    local record = id and redis.call('HGET', key.jobs, id)
    if record then
        local own, until_ = unique_of(record)
        if own == unique_key
            and (until_ == 'g' or until_ == 'r' and count_at(record, 29) == 0
                or until_ == 'b' and not redis.call('ZSCORE', key.buried, place_of(id, record))) then
            return id, record
        end
    end
    local hold = redis.call('HGET', key.unique_holds, unique_key)
    if hold and #hold > 8 and unpacked('>I8', hold) > now then return sub(hold, 9) end
    return nil
end

-- Stores that a job has taken a key. The job is stored already. *hold*: for how long the key is held by time, us.
local function take_unique(unique_key, id, hold)
    redis.call('HSET', key.bodies, unique_field(unique_key), id)
    local expired = redis.call('ZRANGEBYSCORE', key.hold_expiry, '-inf', now, 'LIMIT', 0, HOLDS_DROPPED)
    if #expired > 0 then
        redis.call('ZREM', key.hold_expiry, unpack(expired))
        redis.call('HDEL', key.unique_holds, unpack(expired))
    end
    if hold > 0 then
        redis.call('HSET', key.unique_holds, unique_key, u64(now + hold) .. id)
        redis.call('ZADD', key.hold_expiry, string.format('%.0f', now + hold), unique_key)
    end
end

-- Takes a job's key for the job again, before the job is kicked or rescheduled. This is needed because an event has ended
-- the job's claim to the key. If another job has the key, returns false and changes nothing.
local function take_again(id, unique_key)
    local owner = owner_of(unique_key)
    if owner and owner ~= id then return false end
    if not owner then redis.call('HSET', key.bodies, unique_field(unique_key), id) end
    return true
end
