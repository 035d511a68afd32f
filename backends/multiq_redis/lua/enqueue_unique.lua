--- flags: none
-- Add jobs in their order. Some of these jobs have unique keys or gates. At maxmemory, the server refuses the whole script.
-- KEYS  1 call   2 jobs   3 bodies   4 reasons   5 ready   6 delayed   7 reserved   8 buried   9 held   10 terms
--       11 sequence   12 hint   13 unique_holds   14 hold_expiry   15 parked   16 lines
--       17 openings   18 line_states   19 open_lines   20 fair_lines   21 blocked
-- ARGV  1 the call's number
--       then for each job: its details (include/add.lua), its id, and its record from the priority on
-- =>    the id of each job, or of the job that has its key
--- include record
--- include once
local seen = earlier_answer()
if seen == '' then return {} end
if seen then return cmsgpack.unpack(seen) end
--- include clock
--- include notify
--- include key_and_gates
local key = {
    jobs = KEYS[2], bodies = KEYS[3], reasons = KEYS[4], ready = KEYS[5], delayed = KEYS[6], reserved = KEYS[7],
    buried = KEYS[8], held = KEYS[9], terms = KEYS[10], sequence = KEYS[11], hint = KEYS[12],
    unique_holds = KEYS[13], hold_expiry = KEYS[14], parked = KEYS[15], lines = KEYS[16],
    openings = KEYS[17],
    line_states = KEYS[18], open_lines = KEYS[19], fair_lines = KEYS[20], blocked = KEYS[21],
}
--- include unique
--- include parked
--- include add
-- Fails before the first write if a key is of another type, because another program or a newer multiq has written it.
for _, name in ipairs({ 'ready', 'delayed', 'reserved', 'buried', 'held', 'hold_expiry', 'lines', 'openings' }) do
    redis.call('ZSCORE', key[name], '')
end
for _, name in ipairs({ 'bodies', 'reasons', 'terms', 'unique_holds', 'parked' }) do redis.call('HGET', key[name], '') end
redis.call('GET', key.sequence)
remember('') -- on Redis 6.2 the first write decides whether the script may run at maxmemory
local ids = {}
for i = 2, #ARGV, 3 do ids[#ids + 1] = add(ARGV[i], ARGV[i + 1], ARGV[i + 2]) end
if added_ready then notify(key.hint) end
remember(cmsgpack.pack(ids))
return ids
