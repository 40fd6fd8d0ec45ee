-- The messages of these claims were published.
-- KEYS, for each: the job's records, the job's slots.
-- ARGV, for each: slot, owner, attempt, late.
-- Reply, for each: 1 so recorded, 0 there is no such claim, or it has ended otherwise.
local now = clock()
local replies = {}
for i = 0, #KEYS / 2 - 1 do
  local runs, a = KEYS[2 * i + 1], 4 * i
  local slot, owner, attempt = ARGV[a + 1], ARGV[a + 2], ARGV[a + 3]
  local run = read(runs, slot)
  local done = 0
  if held_by(run, owner, attempt) then
    run.state, run.sent_at, run.late = 'dispatched', now, tonumber(ARGV[a + 4])
    write(runs, slot, run)
    done = 1
  elseif run and run.state == 'dispatched' and ended_by(run, owner, attempt) then
    done = 1
  end
  replies[i + 1] = done
end
return replies
