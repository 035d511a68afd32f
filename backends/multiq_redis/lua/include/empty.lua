-- An empty queue leaves nothing behind. With no job there, no age is compared with the next one that is given out, no
-- lease is open, and nobody has to be woken: so the counter may begin anew, and the marker is about nothing.
local function forget_if_empty(jobs, sequence, hint)
    if redis.call('EXISTS', jobs) == 0 then redis.call('DEL', sequence, hint) end
end
