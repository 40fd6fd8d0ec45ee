-- End claims without a message.
-- KEYS, for each: see common.
-- ARGV, for each: job, slot, owner, attempt, state, reason (optional).
-- Reply, for each: 1 so recorded, 0 it has moved on.
local now = clock()
local replies = {}
for i = 0, #KEYS / 5 - 1 do
  local a = 6 * i
  local owner, attempt, state = ARGV[a + 3], ARGV[a + 4], ARGV[a + 5]
  local row = look(i, ARGV[a + 1], ARGV[a + 2])
  local done = 0
  if state == 'misfire' and tonumber(attempt) > 1 then
    -- It has had a body.
    done = 0
  elseif held_by(row.run, owner, attempt) then
    settle(row, now, state, optional(ARGV[a + 6]))
    done = 1
  elseif row.run and row.run.state == state and ended_by(row.run, owner, attempt) then
    done = 1
  end
  replies[i + 1] = done
end
return replies
