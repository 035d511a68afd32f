-- Delete the counter and the marker of an empty queue. Without jobs there are no ages to compare and no leases, so the
-- counter may restart. The marker is not needed, because there is nothing to notify a consumer of.
local function forget_if_empty(jobs, sequence, hint)
    if redis.call('EXISTS', jobs) == 0 then redis.call('DEL', sequence, hint) end
end
