-- Bodies have ended in retry().
-- KEYS, for each: see common.
-- ARGV, for each: job, slot, attempt, retries, token, how long until the next try's ETA.
-- Reply, for each: 1 so recorded, 0 it has moved on.
local now = clock()
local replies = {}
for i = 0, #KEYS / 5 - 1 do
  local a = 6 * i
  local row = look(i, ARGV[a + 1], ARGV[a + 2])
  local run = row.run
  local done = 0
  if run_ended_by(run, ARGV[a + 3], ARGV[a + 4], ARGV[a + 5]) then
    if run.state == 'running' then
      put(row, 'retrying', now + tonumber(ARGV[a + 6]) + run.terms.queue_timeout)
    end
    done = run.state == 'retrying' and 1 or 0
  end
  replies[i + 1] = done
end
return replies
