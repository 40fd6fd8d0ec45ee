-- Go on with lapsed claims, and with lapsed runs that have attempts left.
-- KEYS, for each wish: see common.
-- ARGV, for each wish: job, slot, from attempt, owner, beat, lease.
-- Reply, for each wish: the attempt that is the caller's now, 0: no longer lapsed.
local now = clock()
local replies = {}

local function takeover(row, from, owner, beat, span)
  local run = row.run
  if not run then
    forget(row, now)
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
  put(row, 'claimed', now + tonumber(span))
  return run.attempt
end

for i = 0, #KEYS / 5 - 1 do
  local a = 6 * i
  local row = look(i, ARGV[a + 1], ARGV[a + 2])
  replies[i + 1] = takeover(row, tonumber(ARGV[a + 3]), ARGV[a + 4], ARGV[a + 5], ARGV[a + 6])
end
return replies
