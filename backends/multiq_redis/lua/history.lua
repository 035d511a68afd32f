--- flags: no-writes
-- Read a part of a history. The outcome that expires last comes first. Outcomes that expire at the same time are in the
-- order of their ids.
-- KEYS  1 outcomes   2 expiring
-- ARGV  1 the maximum number of outcomes   2 the kind, or nothing: all kinds
--       3 time of expiry and 4 id of the outcome after which to begin; no time: from the first
-- =>    now, time of expiry and id of the last outcome that was read, both nothing if no more outcomes follow
--       then for each outcome: its time of expiry, its job's id, and the outcome (include/outcomes.lua)
--       the script stops early if it has read 500 outcomes, or if the reply has 8 MB of outcomes
--- include clock
--- include outcomes
local SLICE = 500

-- Lua's own comparison depends on the server's locale.
local function is_before(one, other)
    for i = 1, math.min(#one, #other) do
        local a, b = string.byte(one, i), string.byte(other, i)
        if a ~= b then return a < b end
    end
    return #one < #other
end

-- Returns how many outcomes expire before the given one. The given outcome may be gone. Among outcomes that expire at the
-- same time, the function searches by bisection.
local function rank_of(expires_at, id)
    local low = redis.call('ZCOUNT', KEYS[2], '-inf', '(' .. expires_at)
    local high = redis.call('ZCOUNT', KEYS[2], '-inf', expires_at)
    while low < high do
        local middle = math.floor((low + high) / 2)
        if is_before(redis.call('ZRANGE', KEYS[2], middle, middle)[1], id) then low = middle + 1 else high = middle end
    end
    return low
end

local limit, kind = tonumber(ARGV[1]), ARGV[2]
local after = ARGV[3] == '' and redis.call('ZCARD', KEYS[2]) or rank_of(ARGV[3], ARGV[4])
local first_live = redis.call('ZCOUNT', KEYS[2], '-inf', now)
local first = math.max(after - SLICE, first_live)
local found = first < after and redis.call('ZRANGE', KEYS[2], first, after - 1, 'WITHSCORES') or {}
local reply, count, bytes, at = { string.format('%.0f', now), '', '' }, 0, 0, #found - 1
while at > 0 and count < limit do
    local outcome = live(redis.call('HGET', KEYS[1], found[at]))
    if outcome and (kind == '' or string.sub(outcome, OUTCOME_HEAD, OUTCOME_HEAD) == kind) then
        bytes = bytes + #outcome
        if bytes > MOST_OUTCOME_BYTES and count > 0 then break end
        count = count + 1
        local size = #reply
        reply[size + 1], reply[size + 2], reply[size + 3] = found[at + 1], found[at], outcome
    end
    at = at - 2
end
if at > 0 or first > first_live then reply[2], reply[3] = found[at + 3], found[at + 2] end
return reply
