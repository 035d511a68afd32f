--- flags: allow-oom
-- Like relay.lua, but for groups with steps that enqueue jobs with unique keys.
-- KEYS  1 seen   2 jobs   3 bodies   4 reasons   5 ready   6 delayed   7 sequence   8 hint   9 partitions   10 held
--       11 terms   12 arrived   13 litter   14 notes   15 note_keys   16 note_expiry   17 outbox   18 reserved
--       19 buried   20 unique_holds   21 hold_expiry   22 parked   23 lines   24 openings
--       25 line_states   26 open_lines   27 fair_lines   28 blocked
--       outside of a cluster, 28 more: the same keys of the partition that has the groups in its outbox
-- ARGV  1 nothing   2 token for the versions of notes
--       then for each group: its score, its mark, the first two bytes of its target, the number of steps
--       and the steps, three arguments each: see include/steps.lua and include/unique_steps.lua
-- Outside of a cluster, the script carries out a group only if the group is still in its outbox and no earlier group must
-- come first. It also deletes the group from the outbox. So if a failover or a restart loses the last writes, it loses a
-- verdict together with the verdict's steps.
-- =>    1 if arrivals were put into the outbox of this slot, because their jobs may be in another partition, else 0
--- include record
--- include clock
--- include notify
--- include key_and_gates
local ARGUMENTS, token = ARGV, ARGV[2]
local key = {
    jobs = KEYS[2], bodies = KEYS[3], reasons = KEYS[4], ready = KEYS[5], delayed = KEYS[6], sequence = KEYS[7],
    hint = KEYS[8], partitions = KEYS[9], held = KEYS[10], terms = KEYS[11], arrived = KEYS[12], litter = KEYS[13],
    notes = KEYS[14], note_keys = KEYS[15], note_expiry = KEYS[16], outbox = KEYS[17], reserved = KEYS[18],
    buried = KEYS[19], unique_holds = KEYS[20], hold_expiry = KEYS[21], parked = KEYS[22],
    lines = KEYS[23], openings = KEYS[24],
    line_states = KEYS[25], open_lines = KEYS[26], fair_lines = KEYS[27], blocked = KEYS[28],
}
--- include holds
--- include steps
--- include unique
--- include parked
--- include add
--- include unique_steps
local at = 28 -- keys of a partition
local source = KEYS[at + 17]
--- include relay
