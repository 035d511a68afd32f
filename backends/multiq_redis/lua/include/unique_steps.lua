-- One more step, for jobs with unique keys or gates:
--   u enqueue   details: see include/add.lua   the id   the record from the priority on
function step.u(details, id, rest)
    arrive_everywhere() -- the enqueue may replace a held job, and then it matters whether that job is released before
    add(details, id, rest)
    is_ready = is_ready or added_ready
end

local check_plain_types = check_types

local function check_types()
    check_plain_types()
    for _, name in ipairs({ 'buried', 'reserved', 'hold_expiry', 'lines', 'openings' }) do redis.call('ZSCORE', key[name], '') end
    redis.call('HGET', key.unique_holds, '')
    redis.call('HGET', key.parked, '')
end
