--- flags: allow-oom
-- Like kick_job.lua, but for jobs with unique keys.
-- KEYS  1 call   2 jobs   3 ready   4 delayed   5 reserved   6 buried   7 hint   8 held
--       9 terms   10 arrived   11 litter   12 bodies   13 unique_holds
-- ARGV  1 the call's number   2 id
-- =>    ok, missing, reserved: a lease holds it, or taken: another job has its key
--- include record
--- include once
--- include clock
--- include notify
--- include find
--- include key_and_gates
local key = {
    jobs = KEYS[2], buried = KEYS[6], terms = KEYS[9], arrived = KEYS[10], litter = KEYS[11], bodies = KEYS[12],
    unique_holds = KEYS[13],
}
--- include holds
--- include unique
local function refusal_of(id, record)
    local unique_key = unique_of(record)
    if unique_key and not take_again(id, unique_key) then return remember('taken') end
    return nil
end

--- include kick_job
