-- Counts the jobs by state. `parked`: the number of parked jobs, or 0 if the script does not know it.
local due = redis.call('ZCOUNT', KEYS[2], '-inf', now)
-- The marker of include/parked.lua is not a job.
local MARKER = string.rep('\0', 12) .. '\128' .. string.rep('\0', 16)
local marker_at = redis.call('ZSCORE', KEYS[2], MARKER)
local has_marker = redis.call('ZSCORE', KEYS[1], MARKER)
local in_ready, in_delayed = has_marker and 1 or 0, marker_at and 1 or 0
local in_due = marker_at and tonumber(marker_at) <= now and 1 or 0
local abandoned = redis.call('ZCOUNT', KEYS[3], '-inf', now)
local pause = pause_end(KEYS[5]) - now
return {
    redis.call('ZCARD', KEYS[1]) - in_ready + due - in_due + abandoned + parked,
    redis.call('ZCARD', KEYS[2]) - in_delayed - due + in_due,
    redis.call('ZCARD', KEYS[3]) - abandoned,
    redis.call('ZCARD', KEYS[4]),
    string.format('%.0f', math.max(pause, 0)),
    redis.call('GET', KEYS[6]) or '',
    redis.call('ZCARD', KEYS[7]),
    in_ready + in_delayed > 0 and '1' or '0',
}
