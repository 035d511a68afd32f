--- flags: allow-oom
-- Make ready a slice of what is due.
-- KEYS  1 jobs   2 ready   3 delayed   4 reserved
-- =>    1 if there may be more, else 0
--- include record
--- include clock
--- include promote
return promote(KEYS[1], KEYS[2], KEYS[3], KEYS[4]) and '1' or '0'
