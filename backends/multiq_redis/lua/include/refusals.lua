-- Returns a function that tells whether the lease of a place is over.
local function refusals()
    local live_until = first_at(KEYS[7])
    local all_live = live_until and live_until > now
    return function(place)
        if all_live then return false end
        local ends_at = redis.call('ZSCORE', KEYS[7], place)
        return not ends_at or tonumber(ends_at) <= now
    end
end
