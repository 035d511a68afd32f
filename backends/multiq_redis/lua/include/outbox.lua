local MOST_SHOWN = 100 -- groups of the outbox in one reply
local MOST_SHOWN_BYTES = 1000000

-- Returns the first groups of the outbox, each with its score and its member.
local function first_of_outbox(limit)
    local shown, bytes = {}, 0
    for i = 0, (limit or MOST_SHOWN) - 1 do
        local found = redis.call('ZRANGE', key.outbox, i, i, 'WITHSCORES') -- one by one, because they may be large
        bytes = bytes + (found[1] and #found[1] or 0)
        if not found[1] or (bytes > MOST_SHOWN_BYTES and i > 0) then break end
        shown[2 * i + 1], shown[2 * i + 2] = found[2], found[1]
    end
    return shown
end
