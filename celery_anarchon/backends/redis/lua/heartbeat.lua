-- Renew the leases of runs, each by its own terms.
-- KEYS, for each: see common.
-- ARGV, for each: job, slot, attempt, retries, token.
-- Reply, for each: 1 renewed, 0 it is not this holder's any more.
local now = clock()
local replies = {}
for i = 0, #KEYS / 5 - 1 do
  local a = 5 * i
  local row = look(i, ARGV[a + 1], ARGV[a + 2])
  local run = row.run
  local done = 0
  if run_by(run, ARGV[a + 3], ARGV[a + 4], ARGV[a + 5]) then
    -- A server without memory judges a script by its first write, and this one needs none.
    redis.call('ZREM', row.leases, row.lease)
    redis.call('ZADD', row.leases, digits(now + run.terms.lease + (run.patience or 0)), row.lease)
    done = 1
  end
  replies[i + 1] = done
end
return replies
