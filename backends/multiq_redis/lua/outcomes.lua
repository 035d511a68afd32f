--- flags: no-writes
-- Read the kept outcomes of some jobs.
-- KEYS  1 outcomes   2 partitions
-- ARGV  the jobs' ids
-- =>    now, the number of partitions of the queue, or nothing if it is not stored
--       then for each id: the outcome (include/outcomes.lua), or nothing; after 8 MB the remaining ids are left out
--- include clock
--- include outcomes
local reply, bytes = { string.format('%.0f', now), redis.call('GET', KEYS[2]) or '' }, 0
for i = 1, #ARGV do
    local outcome = live(redis.call('HGET', KEYS[1], ARGV[i]))
    bytes = bytes + (outcome and #outcome or 0)
    if bytes > MOST_OUTCOME_BYTES and i > 1 then break end
    reply[i + 2] = outcome or false
end
return reply
