--- flags: allow-oom
-- Make one buried, delayed or held job ready now. A ready job stays as it is.
-- KEYS  1 call   2 jobs   3 ready   4 delayed   5 reserved   6 buried   7 hint   8 held
--       9 terms   10 arrived   11 litter
-- ARGV  1 the call's number   2 id
-- =>    ok, missing, reserved: a lease holds it, or unique: it has a unique key, see kick_job_unique.lua
--- include record
--- include once
--- include clock
--- include notify
--- include find
--- include key_and_gates
local key = { terms = KEYS[9], arrived = KEYS[10], litter = KEYS[11] }
--- include holds
local function refusal_of(_, record) return unique_of(record) and 'unique' end

--- include kick_job
