-- The terms of a job: its unique key and its gates. A job with terms has its body in the bodies hash. If the job has a key,
-- these bytes follow the 53 bytes of its record:
--   1 until: g gone, b buried, r reserved   1 number of bytes   the key
-- If the job has gates, then 1 byte G follows, and for each gate, packed:
--   2 number of bytes   the limit's name   2 number of bytes   the key
-- For each unique key, the bodies hash has a field with the id of the job that took the key last. The name of the field is
-- the number of bytes of the key, the key, and bytes 0x03. The fields of ids and extras have other names. So the scripts
-- need no more keys, and the script that deletes the last job of a queue also deletes this field. If a job without terms has
-- its body in the bodies hash, its record has 53 bytes.
local function unique_field(unique_key)
    return string.char(#unique_key) .. unique_key .. string.rep('\3', math.max(1, 16 - #unique_key))
end

-- Returns the key that a job was enqueued with, and the key's `until`; or nil.
local function unique_of(record)
    local size = #record > 55 and flags_of(record) % 2 == 1 and sub(record, 54, 54) ~= 'G' and string.byte(record, 55)
    if not size or size == 0 or #record < 55 + size then return nil end
    return sub(record, 56, 55 + size), sub(record, 54, 54)
end

-- Returns the position at which the gates begin in a record of more than 53 bytes whose body is in the bodies hash; or nil.
local function gates_at(record)
    local at = sub(record, 54, 54) == 'G' and 54 or 56 + (string.byte(record, 55) or 0)
    return sub(record, at, at) == 'G' and at + 1 or nil
end

local function has_gates(record) return #record > 53 and flags_of(record) % 2 == 1 and gates_at(record) ~= nil end

-- Forgets that a job took its key, because the job is gone.
local function forget_unique(id, record, bodies)
    local unique_key = unique_of(record)
    local field = unique_key and unique_field(unique_key)
    if field and redis.call('HGET', bodies, field) == id then redis.call('HDEL', bodies, field) end
end
