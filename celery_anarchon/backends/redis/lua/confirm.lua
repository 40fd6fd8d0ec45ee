-- The messages of these claims were published.
-- KEYS, for each: see common.
-- ARGV, for each: job, slot, owner, attempt, late, delay of the message's ETA.
-- Reply, for each: 1 so recorded, 0 it has moved on.
local now = clock()
local replies = {}
for i = 0, #KEYS / 5 - 1 do
  local a = 6 * i
  local owner, attempt = ARGV[a + 3], ARGV[a + 4]
  local row = look(i, ARGV[a + 1], ARGV[a + 2])
  local run = row.run
  local done = 0
  if held_by(run, owner, attempt) then
    published(row, now, tonumber(ARGV[a + 5]), tonumber(ARGV[a + 6]))
    done = 1
  elseif run and (run.state == 'dispatched' or run.state == 'queued') and ended_by(run, owner, attempt) then
    done = 1
  end
  replies[i + 1] = done
end
return replies
