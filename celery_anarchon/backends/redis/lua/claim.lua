-- Claim slots.
-- KEYS, for each request: the shard's leases, the job's records, the job's slots.
-- ARGV: tolerance; then for each request: job, slot, owner, beat, lease.
-- Reply, for each request: answer, attempt.
local now = clock()
local early = now + tonumber(ARGV[1])
local replies = {}

local function claim(leases, runs, slots, job, slot, owner, beat, span)
  local known = redis.call('HMGET', runs, 'floor', slot)
  if closed(known[1], slot) then
    return 'too-old', 1
  end
  local run
  if known[2] then
    run = cjson.decode(known[2])
    if run.owner ~= owner then
      return 'taken', 1
    end
    if run.state ~= 'claimed' then
      return 'already-sent', run.attempt
    end
  else
    if tonumber(slot) > early then
      return 'too-early', 1
    end
    run = { state = 'claimed', owner = owner, attempt = 1, claimed_at = now, beat = beat }
    write(runs, slot, run)
    redis.call('ZADD', slots, slot, slot)
  end
  redis.call('ZADD', leases, digits(now + tonumber(span)), lease(job, slot, run))
  return 'won', run.attempt
end

for i = 0, #KEYS / 3 - 1 do
  local k, a = 3 * i, 5 * i + 1
  replies[2 * i + 1], replies[2 * i + 2] = claim(
    KEYS[k + 1], KEYS[k + 2], KEYS[k + 3], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4], ARGV[a + 5])
end
return replies
