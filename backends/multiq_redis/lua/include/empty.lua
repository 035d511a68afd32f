-- Delete the counter and the marker of an empty queue. Without jobs there is no age to compare the next one with, no
-- lease, and nothing to notify a consumer of: so the counter may restart, and the marker is without use.
local function forget_if_empty(jobs, sequence, hint)
    if redis.call('EXISTS', jobs) == 0 then redis.call('DEL', sequence, hint) end
end
