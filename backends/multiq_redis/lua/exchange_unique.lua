--- flags: allow-oom
-- Like exchange_steps.lua, but for calls with steps that enqueue jobs with unique keys. Each verdict and its steps are
-- carried out before the next verdict, because the next verdict may end a job whose key a step needs.
-- KEYS  1 call   2 jobs   3 bodies   4 reasons   5 ready   6 delayed   7 reserved   8 buried   9 sequence
--       10 paused   11 hint   12 partitions   13 unreadable   14 outcomes   15 expiring   16 held   17 terms
--       18 arrived   19 litter   20 notes   21 note_keys   22 note_expiry   23 outbox   24 unique_holds
--       25 hold_expiry   26 parked   27 lines   28 openings   29 line_states
--       30 open_lines   31 fair_lines   32 blocked
-- ARGV  1 the call's number   2 token for the new leases   3 the maximum number of new leases
--       then for each verdict two arguments, as in exchange_after.lua: the job's id; the lease's token, a letter and details
--       then the steps of the verdicts, three arguments each: see include/steps.lua and include/unique_steps.lua
--       and last the number of verdicts
-- =>    the reply of exchange.lua, and the first groups of the outbox: score and member of each
--- include verdicts_and_steps
--- include record
--- include once
--- include clock
--- include notify
--- include unreadable
--- include promote
--- include empty
--- include pause
--- include outcomes
--- include key_and_gates
--- include refusals
--- include settle
local KEEPS_OUTCOMES = true
--- include keep
local key = {
    jobs = KEYS[2], bodies = KEYS[3], reasons = KEYS[4], ready = KEYS[5], delayed = KEYS[6], reserved = KEYS[7],
    buried = KEYS[8], sequence = KEYS[9], hint = KEYS[11], partitions = KEYS[12], held = KEYS[16], terms = KEYS[17],
    arrived = KEYS[18], litter = KEYS[19], notes = KEYS[20], note_keys = KEYS[21], note_expiry = KEYS[22],
    outbox = KEYS[23], unique_holds = KEYS[24], hold_expiry = KEYS[25], parked = KEYS[26],
    lines = KEYS[27], openings = KEYS[28],
    line_states = KEYS[29], open_lines = KEYS[30], fair_lines = KEYS[31], blocked = KEYS[32],
}
--- include holds
--- include steps
--- include unique
--- include parked
--- include add
--- include unique_steps
--- include outbox
local LAST_STEP = #ARGUMENTS - 1
--- include settle_in_order
--- include reserve
local function exchange()
--- include exchange
end

return { exchange(), first_of_outbox() }
