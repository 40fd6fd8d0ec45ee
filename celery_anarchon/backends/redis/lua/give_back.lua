-- Granted starts whose bodies surely have not begun are not wanted any more: undo them without counting.
-- KEYS, for each: see common.
-- ARGV, for each: job, slot, attempt, retries, token, attempt of the message.
-- Reply, for each: 1 given back, 0 it has moved on.
local now = clock()
local replies = {}

local function give_back(row, attempt, retries, token, message_attempt)
  local run = row.run
  local state, left = 'queued', 0
  if attempt > message_attempt then
    state = 'claimed'
  elseif retries ~= 0 then
    state, left = 'retrying', retries - 1
  end
  if not run_by(run, attempt, retries, token) then
    return run and run.state == state and run_ended_by(run, attempt, left, token)
  end
  run.retries = left
  if state == 'claimed' then
    run.owner = nil
    put(row, state, now)
  else
    put(row, state, now + run.terms.queue_timeout)
  end
  return true
end

for i = 0, #KEYS / 5 - 1 do
  local a = 6 * i
  local row = look(i, ARGV[a + 1], ARGV[a + 2])
  local done = give_back(row, tonumber(ARGV[a + 3]), tonumber(ARGV[a + 4]), ARGV[a + 5], tonumber(ARGV[a + 6]))
  replies[i + 1] = done and 1 or 0
end
return replies
