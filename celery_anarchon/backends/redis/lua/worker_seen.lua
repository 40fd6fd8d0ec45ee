-- Note that a worker lives, and forget those that vanished long ago.
-- KEYS: the workers, when each was seen, since when there are any.
-- ARGV: owner, its entry (JSON), how long a vanished worker is remembered.
-- Reply: now (digits).
local now = clock()
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], digits(now), ARGV[1])
if redis.call('EXISTS', KEYS[3]) == 0 then
  redis.call('HSET', KEYS[3], 'since', digits(now))
end
local vanished = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. digits(now - tonumber(ARGV[3])), 'LIMIT', 0, 500)
if #vanished > 0 then
  redis.call('HDEL', KEYS[1], unpack(vanished))
  redis.call('ZREM', KEYS[2], unpack(vanished))
end
return digits(now)
