-- Settle lapsed runs that nobody goes on with.
-- KEYS, for each: see common.
-- ARGV: how long a claim without terms of a removed job is kept; then for each: job, slot, attempt, the state it was in,
--   state, reason.
-- Reply, for each: 1 so recorded, 0 refused.
local now = clock()
local day = tonumber(ARGV[1])
local replies = {}

-- One that waits has no lease, and others of its job may live.
local function end_waiting(row, was, state, reason)
  local run = row.run
  if run.state ~= 'waiting' or was ~= 'waiting' or state ~= 'superseded' or reason ~= 'job-removed' then
    return false
  end
  if run.claimed_at + (run.terms and run.terms.queue_timeout or day) > now or not alone(row) then
    return false
  end
  if row.waits == row.slot then
    waits_no_more(row)
  end
  settle(row, now, state, reason)
  return true
end

local function end_lapsed(row, attempt, was, state, reason)
  local run = row.run
  if not run then
    forget(row, now)
    return false
  end
  if run.attempt ~= attempt then
    return false
  end
  if run.state == state and run.reason == reason then
    return true
  end
  if run.state == 'waiting' or was == 'waiting' or state == 'superseded' then
    return end_waiting(row, was, state, reason)
  end
  local sweep, over = ends(row)
  if run.state ~= was or not sweep or sweep > now then
    return false
  end
  if state == 'dispatched' and was ~= 'queued' then
    return false
  end
  if state == 'lost' and reason == 'job-removed' then
    if over + (run.terms and run.terms.queue_timeout or day) > now then
      return false
    end
  elseif was == 'claimed' or (was == 'running' and attempts_left(run)) then
    return false
  end
  settle(row, now, state, reason)
  return true
end

for i = 0, #KEYS / 5 - 1 do
  local a = 6 * i + 1
  local row = look(i, ARGV[a + 1], ARGV[a + 2])
  replies[i + 1] = end_lapsed(row, tonumber(ARGV[a + 3]), ARGV[a + 4], ARGV[a + 5], ARGV[a + 6]) and 1 or 0
end
return replies
