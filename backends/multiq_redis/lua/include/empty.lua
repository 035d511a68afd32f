-- Deletes the counter and the marker of an empty queue. Without jobs, there are no leases and no ages to compare, so the
-- counter may restart. The marker is not needed, because no job is there for which a consumer must be notified. The bodies
-- and reasons hashes may still have extras of jobs that older scripts have deleted, because these scripts do not know
-- extras.
local function forget_if_empty(jobs, sequence, hint, bodies, reasons)
    if redis.call('EXISTS', jobs) == 0 then redis.call('DEL', sequence, hint, bodies, reasons) end
end
