-- Claim slots by a key each, which expires.
-- KEYS, for each request: the slot's marker, the job's records, the job's slots.
-- ARGV: tolerance, window, reach (how old a slot may be); then for each request: slot, owner, beat.
-- Reply, for each request: answer.
local now = clock()
local early, window, oldest = now + tonumber(ARGV[1]), tonumber(ARGV[2]), now - tonumber(ARGV[3])
local replies = {}

local function claim(marker, runs, slots, slot, owner, beat)
  local at = tonumber(slot)
  if at > early then
    return 'too-early'
  end
  if at < oldest then
    return 'too-old'
  end
  -- From the slot on, where it is claimed a moment early.
  local span = window + math.max(0, at - now)
  if not redis.call('SET', marker, owner, 'NX', 'PX', digits(span)) and redis.call('GET', marker) ~= owner then
    return 'taken'
  end
  return mine(runs, slots, slot, owner, beat, now)
end

for i = 0, #KEYS / 3 - 1 do
  local k, a = 3 * i, 3 * i + 3
  replies[i + 1] = claim(KEYS[k + 1], KEYS[k + 2], KEYS[k + 3], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3])
end
return replies
