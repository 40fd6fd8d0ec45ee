-- The messages of these claims were surely not published: open to a takeover at once.
-- KEYS, for each: the shard's leases, the job's records.
-- ARGV, for each: job, slot, owner, attempt.
-- Reply, for each: 1 open again, 0 it has moved on.
local now = clock()
local replies = {}
for i = 0, #KEYS / 2 - 1 do
  local leases, runs, a = KEYS[2 * i + 1], KEYS[2 * i + 2], 4 * i
  local job, slot, owner, attempt = ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4]
  local run = read(runs, slot)
  local done = 0
  if held_by(run, owner, attempt) then
    redis.call('ZREM', leases, lease(job, slot, run))
    run.owner = nil
    redis.call('ZADD', leases, digits(now), lease(job, slot, run))
    write(runs, slot, run)
    done = 1
  end
  replies[i + 1] = done
end
return replies
