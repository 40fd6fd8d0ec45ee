-- Granted starts whose bodies surely have not begun are not wanted any more: undo them without counting.
-- KEYS, for each: see common.
-- ARGV, for each: job, slot, attempt, retries, token, attempt of the message.
-- Reply, for each: 1 given back, 0 it has moved on.
local now = clock()
local replies = {}

local function give_back(row, attempt, retries, token, message_attempt)
  local run = row.run
  if not run_by(run, attempt, retries, token) then
    local given = run and (run.state == 'queued' or run.state == 'retrying' or run.state == 'claimed')
    return given and run.token == token and run.attempt == attempt
  end
  if attempt > message_attempt then
    run.owner = nil
    put(row, 'claimed', now)
  elseif retries > 0 then
    run.retries = retries - 1
    put(row, 'retrying', now + run.terms.queue_timeout)
  else
    put(row, 'queued', now + run.terms.queue_timeout)
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
