--- flags: allow-oom
-- Reschedule a job that is not reserved: it is due after the delay, as if it were enqueued now.
-- KEYS  1 call   2 jobs   3 reasons   4 ready   5 delayed   6 reserved   7 buried   8 sequence   9 hint
--       10 bodies   11 held
-- ARGV  1 the call's number   2 id   3 delay in us
-- =>    ok, missing, reserved: a lease holds it, held: it waits for arrivals, or
--       unique: it has a unique key or gates, see reschedule_unique.lua
--- include record
--- include once
--- include clock
--- include notify
--- include find
--- include key_and_gates
local function refusal_of(_, record) return (unique_of(record) or has_gates(record)) and 'unique' end

--- include reschedule
