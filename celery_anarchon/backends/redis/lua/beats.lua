-- The beats, or workers, seen within a time. Writes nothing.
-- KEYS: they, when each was seen.
-- ARGV: within.
-- Reply, for each: owner, seen (digits), its entry (JSON).
local since = digits(clock() - tonumber(ARGV[1]))
local found = redis.call('ZRANGEBYSCORE', KEYS[2], since, '+inf', 'WITHSCORES')
local replies = {}
for i = 1, #found, 2 do
  local entry = redis.call('HGET', KEYS[1], found[i])
  if entry then
    replies[#replies + 1] = found[i]
    replies[#replies + 1] = digits(tonumber(found[i + 1]))
    replies[#replies + 1] = entry
  end
end
return replies
