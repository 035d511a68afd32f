--- flags: none
-- Like exchange.lua, but for calls with verdicts that store an outcome, a memo or a detail. At maxmemory, the server
-- refuses the whole script. The driver then sends the same call to exchange_at_maxmemory.lua.
-- KEYS  1 call   2 jobs   3 bodies   4 reasons   5 ready   6 delayed   7 reserved   8 buried   9 sequence
--       10 paused   11 hint   12 partitions   13 unreadable   14 outcomes   15 expiring
-- ARGV  1 the call's number   2 token for the new leases   3 the maximum number of new leases
--       then for each verdict two arguments: the job's id; the lease's token, a letter and details. The letters and details:
--       A ack and keep an outcome: for how long, us (8 bytes), the kind (1 byte), the outcome's bytes
--       G R B T like the small letters of exchange.lua; a memo and a detail come before the details: see include/keep.lua
--       all letters of exchange.lua
-- =>    the reply of exchange.lua
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
local settle_all = settle

-- On Redis 6.2, the first write decides whether the script may run at maxmemory. At maxmemory, the server refuses this
-- write.
local function settle()
    remember('')
    return settle_all()
end

--- include reserve
--- include exchange
