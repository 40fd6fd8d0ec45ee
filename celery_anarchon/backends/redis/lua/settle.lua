-- Bodies have ended.
-- KEYS, for each: see common.
-- ARGV, for each: job, slot, attempt, retries, token, state, reason (optional).
-- Reply, for each: 1 so recorded, 0 refused.
local now = clock()
local replies = {}
for i = 0, #KEYS / 5 - 1 do
  local a = 7 * i
  local state = ARGV[a + 6]
  local row = look(i, ARGV[a + 1], ARGV[a + 2])
  local done = 0
  if run_ended_by(row.run, ARGV[a + 3], ARGV[a + 4], ARGV[a + 5]) then
    if row.run.state == 'running' then
      settle(row, now, state, optional(ARGV[a + 7]))
    end
    done = row.run.state == state and 1 or 0
  end
  replies[i + 1] = done
end
return replies
