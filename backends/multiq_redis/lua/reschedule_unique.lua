--- flags: allow-oom
-- Like reschedule.lua, but for jobs with unique keys or gates.
-- KEYS  1 call   2 jobs   3 reasons   4 ready   5 delayed   6 reserved   7 buried   8 sequence   9 hint
--       10 bodies   11 held   12 unique_holds   13 parked   14 lines   15 openings   16 line_states
--       17 open_lines   18 fair_lines   19 blocked
-- ARGV  1 the call's number   2 id   3 delay in us
-- =>    ok, missing, reserved: a lease holds it, held: it waits for arrivals, or
--       taken: another job has its key
--- include record
--- include once
--- include clock
--- include notify
--- include find
--- include key_and_gates
local key = {
    jobs = KEYS[2], ready = KEYS[4], delayed = KEYS[5], buried = KEYS[7], bodies = KEYS[10], unique_holds = KEYS[12],
    parked = KEYS[13], lines = KEYS[14], openings = KEYS[15], hint = KEYS[9],
    line_states = KEYS[16], open_lines = KEYS[17], fair_lines = KEYS[18], blocked = KEYS[19],
}
--- include unique
--- include parked
local function refusal_of(id, record)
    local unique_key = unique_of(record)
    if unique_key and not take_again(id, unique_key) then return remember('taken') end
    unpark(id, record)
    return nil
end

--- include reschedule
