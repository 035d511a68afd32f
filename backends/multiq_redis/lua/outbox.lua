--- flags: allow-oom
-- Delete the given groups of an outbox, because they are carried out, and read the next groups. Also delete data in this
-- slot that is no longer needed: expired marks of groups that were carried out here, and members that had arrived at jobs
-- that are no longer held.
-- KEYS  1 outbox   2 seen   3 arrived   4 litter
-- ARGV  1 the number of groups to read
--       then for each group that is carried out: its score and its mark
-- =>    the number of groups in the outbox; then score and member of the first groups
--- include record
--- include clock
local key = { outbox = KEYS[1], arrived = KEYS[3], litter = KEYS[4] }
--- include holds
--- include outbox
local MOST_DROPPED = 1000 -- marks

local expired = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, MOST_DROPPED)
redis.call('ZREM', KEYS[2], '', unpack(expired)) -- also if nothing has expired: see the first write of relay.lua
for i = 2, #ARGV, 2 do
    -- The mark is compared, too, because a later group may have the same score if the server's clock was set back.
    for _, member in ipairs(redis.call('ZRANGEBYSCORE', key.outbox, ARGV[i], ARGV[i])) do
        if sub(member, 1, 14) == ARGV[i + 1] then redis.call('ZREM', key.outbox, member) end
    end
end
collect_litter()
return { redis.call('ZCARD', key.outbox), unpack(first_of_outbox(tonumber(ARGV[1]))) }
