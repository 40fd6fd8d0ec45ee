-- These claims will never be published.
-- KEYS, for each: the job's records, the job's slots.
-- ARGV, for each: slot, owner, attempt, state, reason (optional).
-- Reply, for each: 1 so recorded, 0 there is no such claim, or it has ended otherwise.
local now = clock()
local replies = {}
for i = 0, #KEYS / 2 - 1 do
  local runs, a = KEYS[2 * i + 1], 5 * i
  local slot, owner, attempt, state = ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4]
  local run = read(runs, slot)
  local done = 0
  if held_by(run, owner, attempt) then
    run.state, run.ended_at, run.reason = state, now, optional(ARGV[a + 5])
    write(runs, slot, run)
    done = 1
  elseif run and run.state == state and ended_by(run, owner, attempt) then
    done = 1
  end
  replies[i + 1] = done
end
return replies
