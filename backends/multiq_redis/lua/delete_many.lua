--- flags: allow-oom
-- Delete the given jobs that are not reserved, and keep the same outcome for each deleted job.
-- KEYS  1 call   2 jobs   3 bodies   4 reasons   5 ready   6 delayed   7 reserved   8 buried   9 sequence
--       10 hint   11 held   12 terms   13 arrived   14 litter   15 outcomes   16 expiring
-- ARGV  1 number   2 how long the outcomes are kept, us (8 bytes), the kind and the bytes; or nothing: none is kept
--       then the jobs' ids, each once
-- =>    a letter for each job: d deleted, m missing, r reserved, g has gates: see delete_many_gated.lua
--- include record
--- include once
--- include clock
--- include find
--- include empty
--- include key_and_gates
--- include outcomes
local key = { terms = KEYS[12], arrived = KEYS[13], litter = KEYS[14] }
--- include holds
local function is_left_to_another_script() return true end

--- include delete_many
