--- flags: allow-oom
-- Delete a slice of the parked jobs. Also delete what limits have left of jobs that are gone.
-- KEYS  1 call   2 jobs   3 bodies   4 reasons   5 lines   6 parked   7 sequence   8 hint   9 ready   10 delayed
--       11 line_states   12 open_lines   13 fair_lines   14 blocked   15 slot_counts   16 slot_ends   17 openings   18 slot_ids
-- ARGV  1 the call's number   2 the maximum number of jobs
-- =>    the number of jobs
--- include record
--- include once
--- include clock
--- include empty
--- include key_and_gates
local key = {
    jobs = KEYS[2], hint = KEYS[8], lines = KEYS[5], parked = KEYS[6], ready = KEYS[9], delayed = KEYS[10],
    line_states = KEYS[11], open_lines = KEYS[12], fair_lines = KEYS[13], blocked = KEYS[14],
    slot_counts = KEYS[15], slot_ends = KEYS[16], slot_ids = KEYS[18], openings = KEYS[17],
}
--- include parked
--- include slot_entries
--- include slot_counts
--- include count_again
--- include forget_lines
local seen = earlier_answer()
if seen then return seen end
local found = redis.call('ZRANGE', KEYS[5], '-', '+', 'BYLEX', 'LIMIT', 0, ARGV[2])
for i = 1, #found do
    local member = found[i]
    local line, rest = parts_of(member)
    local id = sub(rest, 13)
    local record = redis.call('HGET', KEYS[2], id)
    redis.call('ZREM', KEYS[5], member)
    redis.call('HDEL', KEYS[6], id)
    -- otherwise an older multiq has deleted or moved the job
    if record and line_member(line, id, record) == member then
        forget_unique(id, record, KEYS[3])
        redis.call('HDEL', KEYS[2], id)
        redis.call('HDEL', KEYS[3], id, id .. '\1', id .. '\2')
        redis.call('HDEL', KEYS[4], id, id .. '\1')
    end
end
if redis.call('EXISTS', KEYS[6]) == 0 then
    drop_marker()
    forget_turns()
end
if #found > 0 then forget_if_empty(KEYS[2], KEYS[7], KEYS[8], KEYS[3], KEYS[4]) end
if not forget_lines() then forget_ended() end
return remember(tostring(#found))
