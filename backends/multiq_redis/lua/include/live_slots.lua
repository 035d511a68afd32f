-- Returns the leases of a group that have not ended, as pairs of end and id, and the number of the others.
local function live_leases(group, token)
    local ids, live = ids_of(group), {}
    local records = #ids > 0 and redis.call('HMGET', key.jobs, unpack(ids)) or {}
    for i = 1, #ids do
        local record = records[i]
        local ends_at = record and token_of(record) == token and redis.call('ZSCORE', key.reserved, place_of(ids[i], record))
        if ends_at and tonumber(ends_at) > now then live[#live + 1], live[#live + 2] = ends_at, ids[i] end
    end
    return live, math.max(0, number_of(redis.call('HGET', key.slot_counts, group)) - #live / 2)
end
