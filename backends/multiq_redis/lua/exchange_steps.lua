--- flags: allow-oom
-- Like exchange_after.lua, but for calls with verdicts that have steps. At maxmemory, all steps are carried out, and all
-- outcomes are kept, because the jobs that the steps make ready may need these outcomes.
-- KEYS  1 call   2 jobs   3 bodies   4 reasons   5 ready   6 delayed   7 reserved   8 buried   9 sequence
--       10 paused   11 hint   12 partitions   13 unreadable   14 outcomes   15 expiring   16 held   17 terms
--       18 arrived   19 litter   20 notes   21 note_keys   22 note_expiry   23 outbox
-- ARGV  1 the call's number   2 token for the new leases   3 the maximum number of new leases
--       then for each verdict two arguments, as in exchange_after.lua: the job's id; the lease's token, a letter and details
--       then the steps of the verdicts, three arguments each: see include/steps.lua
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
    jobs = KEYS[2], bodies = KEYS[3], reasons = KEYS[4], ready = KEYS[5], delayed = KEYS[6], sequence = KEYS[9],
    hint = KEYS[11], partitions = KEYS[12], held = KEYS[16], terms = KEYS[17], arrived = KEYS[18], litter = KEYS[19],
    notes = KEYS[20], note_keys = KEYS[21], note_expiry = KEYS[22], outbox = KEYS[23],
}
--- include holds
--- include steps
--- include outbox
--- include settle_with_steps
--- include reserve
local function exchange()
--- include exchange
end

return { exchange(), first_of_outbox() }
