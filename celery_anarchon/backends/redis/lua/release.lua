-- Bodies have stopped before their end, because their worker stops.
-- KEYS, for each: see common.
-- ARGV, for each: job, slot, attempt, retries, token.
-- Reply, for each: 1 its lease is over, 0 it has moved on.
local now = clock()
local replies = {}
for i = 0, #KEYS / 5 - 1 do
  local a = 5 * i
  local row = look(i, ARGV[a + 1], ARGV[a + 2])
  local run = row.run
  local done = 0
  if run_by(run, ARGV[a + 3], ARGV[a + 4], ARGV[a + 5]) then
    run.token, run.reason = nil, 'worker-stopped'
    put(row, 'running', now, run.patience)
    done = 1
  end
  replies[i + 1] = done
end
return replies
