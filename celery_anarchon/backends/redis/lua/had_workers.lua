-- Whether a worker with the gate was ever seen. Writes nothing.
-- KEYS: since when there are any.
-- ARGV: none.
-- Reply: 1 yes, 0 no.
return redis.call('EXISTS', KEYS[1])
