-- An outcome is one field of the queue's outcomes hash. The field's name is the job's id.
-- The field's value is packed big-endian:
--   1-8  kept at, us   9-16 expires at, us   17-20 attempts   21 kind: d done, c cancelled   22- the outcome's bytes
-- The job's id is also a member of the expiring set. The scores of this set are the times of expiry.
local OUTCOME_HEAD = 21 -- bytes
local MOST_OUTCOME_BYTES = 8000000 -- the most bytes of outcomes in one reply; a larger outcome comes alone

-- Returns the outcome in the form of a reply, or nil if the outcome has expired or if another program wrote it.
local function live(outcome)
    if not outcome or #outcome < OUTCOME_HEAD then return nil end
    return struct.unpack('>I8', outcome, 9) > now and outcome or nil
end

-- Returns the number of deleted outcomes.
local function drop_expired(outcomes, expiring, limit)
    local ids = redis.call('ZRANGEBYSCORE', expiring, '-inf', now, 'LIMIT', 0, limit)
    if #ids == 0 then return 0 end
    redis.call('ZREMRANGEBYRANK', expiring, 0, #ids - 1)
    redis.call('HDEL', outcomes, unpack(ids))
    return #ids
end
