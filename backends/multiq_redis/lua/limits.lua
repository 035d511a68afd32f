--- flags: none
-- Store and remove the quotas of limits. Let the next reserves look at the lines that wait for these limits.
-- KEYS  1 jobs   2 ready   3 delayed   4 reserved   5 hint   6 limits   7 lines   8 parked   9 line_states
--       10 open_lines   11 fair_lines   12 blocked   13 slot_counts   14 slot_ends   15 rates   16 openings
-- ARGV  1 p: pin the limits; -: do not pin them, and do not change limits that are pinned
--       then for each limit: its name, and its quota (include/open_gates.lua), or nothing to remove it
-- =>    ok
--- include record
--- include clock
--- include notify
--- include key_and_gates
local key = {
    jobs = KEYS[1], ready = KEYS[2], delayed = KEYS[3], reserved = KEYS[4], hint = KEYS[5], limits = KEYS[6],
    lines = KEYS[7], parked = KEYS[8], line_states = KEYS[9], open_lines = KEYS[10], fair_lines = KEYS[11],
    blocked = KEYS[12], slot_counts = KEYS[13], slot_ends = KEYS[14], rates = KEYS[15], openings = KEYS[16],
}
--- include parked
--- include open_gates
local is_any_parked
--- include parked_marker
-- If a gate would wait longer than the new rate requires, shortens the gate's wait. If there are very many gates, the wait
-- of each further gate is shortened when a job comes to this gate (include/open_gates.lua).
local function forget_slower_rate(limit)
    local quota = quota_of(limit)
    if not quota then return end
    local latest = string.format('%.0f', now + quota.burst * quota.interval)
    for _, gate in ipairs(redis.call('ZRANGEBYSCORE', key.rates, '(' .. latest, '+inf', 'LIMIT', 0, 500)) do
        if sub(gate, 1, #limit) == limit then redis.call('ZADD', key.rates, latest, gate) end
    end
end

for i = 2, #ARGV, 2 do
    local name, packed = ARGV[i], ARGV[i + 1]
    local known = redis.call('HGET', key.limits, name)
    if ARGV[1] == 'p' or not known or sub(known, 18, 18) ~= 'p' then
        if packed == '' then redis.call('HDEL', key.limits, name) else redis.call('HSET', key.limits, name, packed) end
        local limit = pack('>I2', #name) .. name
        if known ~= packed then forget_slower_rate(limit) end
        if known ~= packed and redis.call('EXISTS', key.parked) == 1 then
            -- The next reserves look at the lines, and each reserve looks at some of them, because the limit may have any
            -- number of keys.
            local at = string.format('%.0f', now)
            redis.call('ZADD', key.openings, at, limit .. '\255l', at, limit .. '\255b')
        end
    end
end
if redis.call('EXISTS', key.parked) == 1 then
    is_any_parked = true
    set_marker()
    notify(key.hint)
end
return 'ok'
