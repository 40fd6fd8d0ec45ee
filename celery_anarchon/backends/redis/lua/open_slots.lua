-- Which slots somebody could win now. Writes nothing.
-- KEYS, for each: the job's records.
-- ARGV: who asks; then for each: slot.
-- Reply, for each: 1 it might be won, 0 not.
local replies = {}
for i, runs in ipairs(KEYS) do
  local slot = ARGV[i + 1]
  local known = redis.call('HMGET', runs, 'floor', slot)
  local run = known[2] and cjson.decode(known[2])
  local open = not closed(known[1], slot)
  if open and run then
    open = run.state == 'waiting' or (run.state == 'claimed' and run.owner == ARGV[1])
  end
  replies[i] = open and 1 or 0
end
return replies
