-- Go on with lapsed claims.
-- KEYS, for each wish: the shard's leases, the job's records.
-- ARGV, for each wish: job, slot, from attempt, owner, beat, lease.
-- Reply, for each wish: the attempt that is the caller's now, 0: no longer lapsed.
local now = clock()
local replies = {}

local function takeover(leases, runs, job, slot, from, owner, beat, span)
  local run = read(runs, slot)
  if not run or run.state ~= 'claimed' then
    -- The record is gone, by eviction or by hand, and its lease would stand at the head of the list for ever.
    for _, mark in ipairs({ ':h:', ':a:' }) do
      redis.call('ZREM', leases, slot .. ':' .. from .. mark .. job)
    end
    return 0
  end
  if run.attempt ~= tonumber(from) then
    return 0
  end
  local before = lease(job, slot, run)
  local over = redis.call('ZSCORE', leases, before)
  if run.owner ~= owner then
    if not over or tonumber(over) > now then
      return 0
    end
    redis.call('ZREM', leases, before)
  end
  run.owner, run.beat = owner, beat
  write(runs, slot, run)
  redis.call('ZADD', leases, digits(now + tonumber(span)), lease(job, slot, run))
  return run.attempt
end

for i = 0, #KEYS / 2 - 1 do
  local a = 6 * i
  replies[i + 1] = takeover(
    KEYS[2 * i + 1], KEYS[2 * i + 2], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4], ARGV[a + 5], ARGV[a + 6])
end
return replies
