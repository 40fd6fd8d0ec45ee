-- Go on with lapsed claims, and with lapsed runs that have attempts left; and write the messages that come with them.
-- KEYS, for each wish: see common.
-- ARGV, for each wish: job, slot, from attempt, owner, beat, lease, forms, message (see sending).
-- Reply, for each wish: the attempt that is the caller's now, 0: no longer lapsed; 1: its message was written.
local now = clock()
local replies = {}

local function takeover(row, from, owner, beat, span, message)
  local run = row.run
  if not run then
    forget(row, now)
  end
  if message and run and (run.state == 'queued' or run.state == 'dispatched')
    and ended_by(run, owner, message.attempt) and (run.attempt == from or run.attempt == from + 1) then
    -- It sent it in this very way, and the answer was lost.
    return run.attempt, 1
  end
  if not row.lives then
    return 0
  end
  local _, over = ends(row)
  local lapsed = over and over <= now
  if run.state == 'running' and run.attempt == from then
    if not (lapsed and attempts_left(run)) then
      return 0
    end
    run.attempt, run.retries, run.reason = run.attempt + 1, nil, nil
  elseif run.state ~= 'claimed' then
    return 0
  elseif run.owner ~= owner then
    if not (lapsed and run.attempt == from) then
      return 0
    end
  elseif run.attempt ~= from and run.attempt ~= from + 1 then
    return 0
  end
  run.owner, run.beat, run.token = owner, beat, nil
  if lapsed and send(row, now, message) then
    return run.attempt, 1
  end
  put(row, 'claimed', now + tonumber(span))
  return run.attempt
end

local a = 1
for i = 0, #KEYS / 5 - 1 do
  local row = look(i, ARGV[a], ARGV[a + 1])
  local forms, own = forms_at(a + 6)
  local message, next_one = message_at(forms, own)
  local attempt, sent = takeover(row, tonumber(ARGV[a + 2]), ARGV[a + 3], ARGV[a + 4], ARGV[a + 5], message)
  replies[2 * i + 1], replies[2 * i + 2] = attempt, sent or 0
  a = next_one
end
return replies
