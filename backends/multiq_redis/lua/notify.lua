--- flags: allow-oom
-- Leave a marker that ends the wait of one consumer, now or when the next one begins to wait.
-- Allowed at maxmemory, so that stored jobs are worked off. On Redis 6.2 the DEL, which may run then, allows the rest.
-- KEYS  1 hint   2 jobs
-- ARGV  1 seconds until the marker expires, or 0: it stays, if there is a job
-- =>    ok
redis.call('DEL', KEYS[1])
if ARGV[1] == '0' and redis.call('EXISTS', KEYS[2]) == 0 then return 'ok' end
redis.call('ZADD', KEYS[1], '0', '1')
if ARGV[1] ~= '0' then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
return 'ok'
