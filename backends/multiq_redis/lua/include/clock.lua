-- Now, by this server's clock, in microseconds: exact in a double until the year 2255.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
