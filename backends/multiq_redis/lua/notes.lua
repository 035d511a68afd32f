--- flags: no-writes
-- Read a part of a listing of notes, sorted by their keys.
-- KEYS  1 notes   2 note_keys
-- ARGV  1 the maximum number of notes   2 and 3 the range of keys, as ZRANGE BYLEX takes it
-- =>    now, and the last key that was read, or nothing if no more keys follow
--       then for each note: its key, and the note (include/steps.lua)
--       the script stops early after 500 keys, or after 8 MB of notes
--- include clock
--- include note
local SLICE = 500
local MOST_BYTES = 8000000

local names = redis.call('ZRANGE', KEYS[2], ARGV[2], ARGV[3], 'BYLEX', 'LIMIT', 0, SLICE)
local reply, count, bytes, at = { string.format('%.0f', now), '' }, 0, 0, 0
while at < #names and count < tonumber(ARGV[1]) do
    local note = live_note(redis.call('HGET', KEYS[1], names[at + 1]))
    if note then
        bytes = bytes + #note
        if bytes > MOST_BYTES and count > 0 then break end
        count = count + 1
        reply[#reply + 1] = names[at + 1]
        reply[#reply + 1] = note
    end
    at = at + 1
end
if at < #names or #names == SLICE then reply[2] = names[at] end
return reply
