-- How a job is stored: one field of the queue's jobs hash, named by its id, packed big-endian.
--   1-8  sequence (age)   9-16 enqueued at, us   17-20 priority   21-28 ttr, us
--   29-32 attempts   33-36 crashes   37-40 kicks   41 flags   42-53 token, zeros without a lease   54- body
-- flags: 1 the body is in the bodies hash, 2 there is a reason in the reasons hash.
-- Its place, the member of the sorted set that it is in: sequence, priority, id. So equal scores sort by age.
-- A job keeps its record in all states; the set that holds its place is its state.
local sub = string.sub
local pack, unpacked = struct.pack, struct.unpack
local NOBODY = string.rep('\0', 12)

local function u32(number) return pack('>I4', number) end

local function u64(number) return pack('>I8', number) end

local function place_of(id, record) return sub(record, 1, 8) .. sub(record, 17, 20) .. id end

local function id_in(place) return sub(place, 13) end

local function priority_in(place) return (unpacked('>I4', place, 9)) end

local function token_of(record) return sub(record, 42, 53) end

local function flags_of(record) return string.byte(record, 41) end

local function ttr_of(record) return (unpacked('>I8', record, 21)) end

local function count_at(record, position) return (unpacked('>I4', record, position)) end
