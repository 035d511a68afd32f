-- The present time by this server's clock, in microseconds. A double can hold this number exactly until the year 2255.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
