-- When a queue's pause ends; 0 if there is none, or if something else is stored, which only another program writes.
local function pause_end(paused)
    local at = tonumber(redis.call('GET', paused) or 0) or 0
    return at > 0 and at < 2 ^ 63 and at or 0
end
