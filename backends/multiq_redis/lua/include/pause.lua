-- Returns the time at which a queue's pause ends. Returns 0 if there is no pause, or if the key has an invalid value. Only
-- another program writes an invalid value.
local function pause_end(paused)
    local at = tonumber(redis.call('GET', paused) or 0) or 0
    return at > 0 and at < 2 ^ 63 and at or 0
end
