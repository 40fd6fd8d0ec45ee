-- Messages whose delivery never asked to start are gone: expired, revoked, rejected.
-- KEYS, for each: see common.
-- ARGV, for each: job, slot, attempt, retries, reason.
-- Reply, for each: 1 so recorded, 0 refused.
local now = clock()
local replies = {}

local function unstarted(row, attempt, retries, reason)
  local run = row.run
  if not run or run.attempt ~= attempt then
    return false
  end
  local state = run.state
  if state == 'lost-in-queue' then
    return run.reason == reason
  end
  local unbegun = state == 'claimed' or state == 'queued' or state == 'dispatched'
  if not unbegun and not (state == 'retrying' and retries > (run.retries or 0)) then
    return false
  end
  settle(row, now, 'lost-in-queue', reason)
  return true
end

for i = 0, #KEYS / 5 - 1 do
  local a = 5 * i
  local row = look(i, ARGV[a + 1], ARGV[a + 2])
  replies[i + 1] = unstarted(row, tonumber(ARGV[a + 3]), tonumber(ARGV[a + 4]), ARGV[a + 5]) and 1 or 0
end
return replies
