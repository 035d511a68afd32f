--- flags: allow-oom
-- Make a slice of the due jobs ready.
-- KEYS  1 jobs   2 bodies   3 reasons   4 ready   5 delayed   6 reserved   7 unreadable
-- =>    1 if more jobs may be due, else 0
--- include record
--- include clock
--- include unreadable
--- include promote
return promote(KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]) and '1' or '0'
