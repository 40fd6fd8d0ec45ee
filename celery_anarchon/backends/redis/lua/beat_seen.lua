-- Note that a beat lives, and forget those that vanished long ago.
-- KEYS: the beats, when each was seen, what the namespace says of itself.
-- ARGV: owner, its entry (JSON), how long a vanished beat is remembered, layout, app (empty: not known).
-- Reply: now (digits); 1: what the namespace says of itself was gone, and who knows what else, 0: all is well.
local now = clock()
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], digits(now), ARGV[1])
local vanished = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. digits(now - tonumber(ARGV[3])), 'LIMIT', 0, 500)
if #vanished > 0 then
  redis.call('HDEL', KEYS[1], unpack(vanished))
  redis.call('ZREM', KEYS[2], unpack(vanished))
end
local emptied = 0
if ARGV[5] ~= '' and redis.call('EXISTS', KEYS[3]) == 0 then
  redis.call('HSET', KEYS[3], 'layout', ARGV[4], 'app', ARGV[5])
  emptied = 1
end
return { digits(now), emptied }
