-- The messages of these claims were published.
-- KEYS, for each: the shard's leases, the job's records.
-- ARGV, for each: job, slot, owner, attempt, late.
-- Reply, for each: 1 so recorded, 0 it has moved on.
local now = clock()
local replies = {}
for i = 0, #KEYS / 2 - 1 do
  local leases, runs, a = KEYS[2 * i + 1], KEYS[2 * i + 2], 5 * i
  local job, slot, owner, attempt = ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4]
  local run = read(runs, slot)
  local done = 0
  if held_by(run, owner, attempt) then
    redis.call('ZREM', leases, lease(job, slot, run))
    run.state, run.sent_at, run.late = 'dispatched', now, tonumber(ARGV[a + 5])
    write(runs, slot, run)
    done = 1
  elseif run and run.state == 'dispatched' and ended_by(run, owner, attempt) then
    done = 1
  end
  replies[i + 1] = done
end
return replies
