-- If the server has forgotten a call that is repeated, a group of its token may be there. Stores the ids of both. *groups*: each
-- group, and its new ids (MessagePack).
local function join_groups(groups)
    for i = 1, #groups, 2 do
        local ids, is_known = ids_of(groups[i]), {}
        for j = 1, #ids do is_known[ids[j]] = true end
        for _, id in ipairs(cmsgpack.unpack(groups[i + 1])) do
            if not is_known[id] then ids[#ids + 1] = id end
        end
        redis.call('HSET', key.slot_ids, groups[i], cmsgpack.pack(ids))
    end
end
