-- Whose namespace this is, of which layout, and how its claims are stored.
-- KEYS: what the namespace says of itself.
-- ARGV: layout, app, '1': record all where nothing is recorded, '0': write nothing; strategy.
-- Reply: layout, app and strategy as recorded, all empty: nothing is.
local known = redis.call('HMGET', KEYS[1], 'layout', 'app', 'strategy')
-- There was one strategy once, and no word for it.
if known[1] and not known[3] then
  known[3] = 'lease'
end
if ARGV[3] == '1' then
  if not known[1] then
    redis.call('HSET', KEYS[1], 'layout', ARGV[1])
    known[1] = ARGV[1]
    if not known[3] then
      redis.call('HSET', KEYS[1], 'strategy', ARGV[4])
      known[3] = ARGV[4]
    end
  end
  -- Not below a newer layout, nor beside another way of claiming: there nothing is ours to write.
  if not known[2] and tonumber(known[1]) <= tonumber(ARGV[1]) and known[3] == ARGV[4] then
    redis.call('HSET', KEYS[1], 'app', ARGV[2])
    known[2] = ARGV[2]
  end
end
return { known[1] or '', known[2] or '', known[3] or '' }
