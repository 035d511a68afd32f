--- flags: no-writes
-- Read one note.
-- KEYS  1 notes
-- ARGV  1 the key
-- =>    now, and the note (include/steps.lua), or nothing if there is none, or if it has expired
--- include clock
--- include note
return { string.format('%.0f', now), live_note(redis.call('HGET', KEYS[1], ARGV[1])) or '' }
