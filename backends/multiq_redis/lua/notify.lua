--- flags: allow-oom
-- Set a marker that ends the wait of one consumer. If no consumer waits now, the marker ends the wait of the next consumer
-- that begins to wait. The server runs this script at maxmemory, too, so that workers can work off the stored jobs. On Redis
-- 6.2, the first write is a DEL. A DEL is allowed at maxmemory, so the rest of the script is allowed, too.
-- KEYS  1 hint   2 jobs
-- ARGV  1 seconds until the marker expires, or 0: it stays, if there is a job
-- =>    ok
redis.call('DEL', KEYS[1])
if ARGV[1] == '0' and redis.call('EXISTS', KEYS[2]) == 0 then return 'ok' end
redis.call('ZADD', KEYS[1], '0', '1')
if ARGV[1] ~= '0' then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
return 'ok'
