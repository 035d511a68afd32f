-- A call takes effect only once, even if it arrives several times. KEYS[1] stores the last call of one client: its number
-- and its answer. ARGV[1] is the number. A client's numbers ascend, and a client has one call in flight at a time. If the
-- number equals the stored one, the call is a repetition after a lost reply. If the number is smaller, the call is a late
-- duplicate whose reply no client reads. Neither a repetition nor a duplicate changes anything.
local MEMORY = '300' -- seconds; text, because Redis would convert a number
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
