--- flags: allow-oom
-- Like delete_many.lua, but for jobs with gates.
-- KEYS  1 call   2 jobs   3 bodies   4 reasons   5 ready   6 delayed   7 reserved   8 buried   9 sequence
--       10 hint   11 held   12 terms   13 arrived   14 litter   15 outcomes   16 expiring   17 parked   18 lines   19 openings
--       20 line_states   21 open_lines   22 fair_lines   23 blocked   24 slot_counts   25 slot_ends   26 slot_ids
-- ARGV  1 number   2 how long the outcomes are kept, us (8 bytes), the kind and the bytes; or nothing: none is kept
--       then the jobs' ids, each once
-- =>    a letter for each job: d deleted, m missing, r reserved
--- include record
--- include once
--- include clock
--- include find
--- include empty
--- include key_and_gates
--- include outcomes
local key = {
    jobs = KEYS[2], ready = KEYS[5], delayed = KEYS[6], terms = KEYS[12], arrived = KEYS[13], litter = KEYS[14],
    parked = KEYS[17], lines = KEYS[18], openings = KEYS[19], hint = KEYS[10],
    line_states = KEYS[20], open_lines = KEYS[21], fair_lines = KEYS[22], blocked = KEYS[23],
    slot_counts = KEYS[24], slot_ends = KEYS[25], slot_ids = KEYS[26],
}
--- include holds
--- include parked
--- include slot_entries
--- include slot_counts
--- include count_again
--- include forget_lines
local function is_left_to_another_script(id, record)
    unpark(id, record)
    return false
end

local forget_plain_keys = forget_if_empty

local function forget_if_empty(...)
    forget_plain_keys(...)
    if not forget_lines() then forget_ended() end
end

--- include delete_many
