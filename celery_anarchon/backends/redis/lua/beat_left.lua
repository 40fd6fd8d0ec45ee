-- A beat, or a worker, stops on purpose.
-- KEYS: they, when each was seen.
-- ARGV: owner.
-- Reply: 1 it was known, 0 it was not.
redis.call('HDEL', KEYS[1], ARGV[1])
return redis.call('ZREM', KEYS[2], ARGV[1])
