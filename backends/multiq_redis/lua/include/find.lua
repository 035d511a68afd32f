-- A job as it stands now. Returns its state and its record, or nil.
-- state: ready, delayed, reserved, buried; a lease that ended, or a due time that has passed, is ready.
local function find(id, jobs, ready, delayed, reserved, buried)
    local record = redis.call('HGET', jobs, id)
    if not record then return nil end
    local place = place_of(id, record)
    for state, set in pairs({ delayed = delayed, reserved = reserved }) do
        local at = redis.call('ZSCORE', set, place)
        if at then
            if tonumber(at) <= now then return 'ready', record, at, set end
            return state, record, at, set
        end
    end
    local at = redis.call('ZSCORE', buried, place)
    if at then return 'buried', record, at, buried end
    return 'ready', record, '0', ready
end
