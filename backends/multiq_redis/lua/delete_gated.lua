--- flags: allow-oom
-- Like delete.lua, but for jobs with gates.
-- KEYS  1 call   2 jobs   3 bodies   4 reasons   5 ready   6 delayed   7 reserved   8 buried   9 sequence
--       10 hint   11 held   12 terms   13 arrived   14 litter   15 parked   16 lines   17 openings
--       18 line_states   19 open_lines   20 fair_lines   21 blocked   22 slot_counts   23 slot_ends   24 slot_ids
-- ARGV  1 the call's number   2 id
-- =>    ok, missing, or reserved: a lease holds it
--- include record
--- include once
--- include clock
--- include find
--- include empty
--- include key_and_gates
local key = {
    jobs = KEYS[2], ready = KEYS[5], delayed = KEYS[6], terms = KEYS[12], arrived = KEYS[13], litter = KEYS[14],
    parked = KEYS[15], lines = KEYS[16], openings = KEYS[17], hint = KEYS[10],
    line_states = KEYS[18], open_lines = KEYS[19], fair_lines = KEYS[20], blocked = KEYS[21],
    slot_counts = KEYS[22], slot_ends = KEYS[23], slot_ids = KEYS[24],
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

--- include delete
