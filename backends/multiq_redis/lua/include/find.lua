-- Finds a job. Returns its present state and its record, or nil.
-- state: ready, delayed, reserved, buried, held; if the job's lease has ended or its due time has passed, the state is
-- ready.
local function find(id, jobs, ready, delayed, reserved, buried, held)
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
    if redis.call('ZSCORE', held, place) then return 'held', record, '0', held end
    return 'ready', record, '0', ready
end
