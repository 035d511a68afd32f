--- flags: allow-oom
-- Delete a job that is not reserved.
-- KEYS  1 call   2 jobs   3 bodies   4 reasons   5 ready   6 delayed   7 reserved   8 buried   9 sequence
--       10 hint   11 held   12 terms   13 arrived   14 litter
-- ARGV  1 the call's number   2 id
-- =>    ok, missing, reserved: a lease holds it, or gated: see delete_gated.lua
--- include record
--- include once
--- include clock
--- include find
--- include empty
--- include key_and_gates
local key = { terms = KEYS[12], arrived = KEYS[13], litter = KEYS[14] }
--- include holds
local function is_left_to_another_script() return true end

--- include delete
