-- The verdicts that store an outcome, a memo or a detail. Their letters are capitals. The script defines KEEPS_OUTCOMES. It
-- is false in the script for maxmemory, which keeps no outcomes.
local DROPPED_PER_KEEP = 2 -- expired outcomes that each new outcome deletes: more than one, so that their number falls
local kept, expiries, count = {}, {}, 0
local ends = {} -- packed duration -> the time of expiry; text, because Redis would convert each number

function carry_out.A(id, record, _, packed)
    count = count + 1
    local duration = sub(packed, 1, 8)
    local known = ends[duration]
    if not known then
        local ends_at = now + unpacked('>I8', duration)
        known = { string.format('%.0f', ends_at), u64(now) .. u64(ends_at) }
        ends[duration] = known
    end
    kept[2 * count - 1], kept[2 * count] = id, known[2] .. sub(record, 29, 32) .. sub(packed, 9)
    expiries[2 * count - 1], expiries[2 * count] = known[1], id
    return nil
end

-- Called before the jobs are deleted. If a key is of another type, the script then fails while the jobs are still there.
function carry_out.finish()
    if count == 0 then return end
    if KEEPS_OUTCOMES then
        redis.call('HSET', KEYS[14], unpack(kept))
        redis.call('ZADD', KEYS[15], unpack(expiries))
    end
    drop_expired(KEYS[14], KEYS[15], DROPPED_PER_KEEP * count)
    kept, expiries, count = {}, {}, 0
end

-- Reads a string of bytes. First come four bytes with the string's length plus one, or with 0 if there is no string. Then
-- come the bytes of the string.
local function optional(packed, at)
    local size = unpacked('>I4', packed, at)
    if size == 0 then return nil, at + 4 end
    return sub(packed, at + 4, at + 2 + size), at + 3 + size
end

local function store_extras(id, had, memo, detail)
    local extra = id .. '\1'
    if memo then
        redis.call('HSET', KEYS[3], extra, memo)
    elseif not had then
        redis.call('HDEL', KEYS[3], extra) -- an older script may have deleted an earlier job of this id, but not its memo
    end
    if detail then
        redis.call('HSET', KEYS[4], extra, detail)
    elseif not had then
        redis.call('HDEL', KEYS[4], extra)
    end
end

-- The arguments are a memo, a detail, and the arguments of the verdict with the small letter. The plain verdict is
-- carried out first, because it deletes the old detail.
for letter, plain in pairs({ G = carry_out.g, R = carry_out.r, B = carry_out.b, T = carry_out.t }) do
    carry_out[letter] = function(id, record, place, packed)
        local memo, detail, at
        memo, at = optional(packed, 1)
        detail, at = optional(packed, at)
        local flags = flags_of(record)
        record = sub(record, 1, 40) .. string.char((flags < 196 and 192 or 252) + flags % 4) .. sub(record, 42)
        if letter == 'T' then redis.call('HSET', KEYS[2], id, record) end -- the other verdicts write the record
        local changed = plain(id, record, place, sub(packed, at))
        store_extras(id, flags >= 128, memo, detail)
        return changed
    end
end
