-- How a job is stored: one field of the queue's jobs hash, named by its id, packed big-endian.
--   1-8  sequence (age)   9-16 enqueued at, us   17-20 priority   21-28 ttr, us
--   29-32 attempts   33-36 crashes   37-40 kicks   41 flags   42-53 token, zeros without a lease   54- body
-- flags: 1 the body is in the bodies hash, 2 there is a reason in the reasons hash.
--   128 or more: there may be a reason and extras. The extras are the job's memo, in the bodies hash, and its detail,
--   in the reasons hash. Both are in the field id .. '\1'. No job has this text as its id. So the scripts need no more keys.
--   196 or more: the job is doomed. The reason is in the bodies hash, in the field id .. '\2'.
--   Scripts write 192 or 252, or a number that is at most 3 higher. Older scripts, which do not know extras, subtract 2
--   in each release, bury or abandon without a reason. After 28 such verdicts the flags still have the same meaning.
--   (The scripts have these numbers without names: each name that a function uses slows the start of every call.)
-- A job's place is its member in a sorted set: sequence, priority, id. So members with equal scores are sorted by age. A job
-- keeps its record in all states. The set that has the job's place shows the job's state.
local sub = string.sub
local pack, unpacked = struct.pack, struct.unpack
local NO_HOLDER = string.rep('\0', 12)

local function u32(number) return pack('>I4', number) end

local function u64(number) return pack('>I8', number) end

local function place_of(id, record) return sub(record, 1, 8) .. sub(record, 17, 20) .. id end

local function id_in(place) return sub(place, 13) end

local function priority_in(place) return (unpacked('>I4', place, 9)) end

local function token_of(record) return sub(record, 42, 53) end

local function flags_of(record) return string.byte(record, 41) end

local function ttr_of(record) return (unpacked('>I8', record, 21)) end

local function count_at(record, position) return (unpacked('>I4', record, position)) end
