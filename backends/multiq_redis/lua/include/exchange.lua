-- The exchange itself, and its repetition. For a repetition, returns the answers of the first reply, and the jobs of the
-- first reply whose leases are still live.
local function again(seen)
    local colon = string.find(seen, ':', 1, true)
    local reply = { '0', string.format('%.0f', now), '', sub(seen, 1, colon - 1), partitions }
    local is_over = refusals()
    for _, id in ipairs(cmsgpack.unpack(sub(seen, colon + 1))) do
        local record = redis.call('HGET', KEYS[2], id)
        if record and token_of(record) == token and not is_over(place_of(id, record)) then
            show(reply, #reply, id, record)
        end
    end
    if limit > 0 and #reply == 5 then reply[1] = '1' end -- more jobs may be ready now, so the caller must ask again
    return reply
end

local seen = earlier_answer()
if seen == '' then return { '0', '0', '', '', '' } end
if seen then return again(seen) end

local reply = { '0', string.format('%.0f', now), '', '', partitions }
reply[4] = settle()
local taken = limit > 0 and reserve(reply) or {}
if is_any_gone and #taken == 0 then forget_if_empty(KEYS[2], KEYS[9], KEYS[11], KEYS[3], KEYS[4]) end
remember(reply[4] .. ':' .. cmsgpack.pack(taken))
return reply
