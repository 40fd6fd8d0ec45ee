-- Whose namespace this is, and of which layout.
-- KEYS: what the namespace says of itself.
-- ARGV: layout, app, '1': record both where nothing is recorded, '0': write nothing.
-- Reply: layout and app as recorded, both empty: nothing is.
local known = redis.call('HMGET', KEYS[1], 'layout', 'app')
if ARGV[3] == '1' then
  if not known[1] then
    redis.call('HSET', KEYS[1], 'layout', ARGV[1])
    known[1] = ARGV[1]
  end
  -- Not below a newer layout: there nothing is ours to write.
  if not known[2] and tonumber(known[1]) <= tonumber(ARGV[1]) then
    redis.call('HSET', KEYS[1], 'app', ARGV[2])
    known[2] = ARGV[2]
  end
end
return { known[1] or '', known[2] or '' }
