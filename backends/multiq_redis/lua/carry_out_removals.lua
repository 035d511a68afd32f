--- flags: allow-oom
-- Like carry_out.lua, but for steps that add neither a job nor a note. The server runs this script at maxmemory, too.
-- KEYS  1 call   2 jobs   3 bodies   4 reasons   5 ready   6 delayed   7 sequence   8 hint   9 partitions   10 held
--       11 terms   12 arrived   13 litter   14 notes   15 note_keys   16 note_expiry   17 outbox
-- ARGV  1 the call's number   2 token for the versions of notes   3 the number of conditions
--       then for each condition: a note's key, and its version, or nothing if the note must not exist
--       then the steps, three arguments each: see include/steps.lua
-- =>    1 if the conditions held, else 0; and the first groups of the outbox: score and member of each
--- include record
--- include once
--- include clock
--- include notify
local ARGUMENTS, token = ARGV, ARGV[2]
local key = {
    jobs = KEYS[2], bodies = KEYS[3], reasons = KEYS[4], ready = KEYS[5], delayed = KEYS[6], sequence = KEYS[7],
    hint = KEYS[8], partitions = KEYS[9], held = KEYS[10], terms = KEYS[11], arrived = KEYS[12], litter = KEYS[13],
    notes = KEYS[14], note_keys = KEYS[15], note_expiry = KEYS[16], outbox = KEYS[17],
}
--- include holds
--- include steps
--- include outbox
--- include carry_out
