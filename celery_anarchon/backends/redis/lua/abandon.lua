-- The messages of these claims were surely not published: open to a takeover at once.
-- KEYS, for each: see common.
-- ARGV, for each: job, slot, owner, attempt.
-- Reply, for each: 1 open again, 0 it has moved on.
local now = clock()
local replies = {}
for i = 0, #KEYS / 5 - 1 do
  local a = 4 * i
  local row = look(i, ARGV[a + 1], ARGV[a + 2])
  local done = 0
  if held_by(row.run, ARGV[a + 3], ARGV[a + 4]) then
    row.run.owner = nil
    put(row, 'claimed', now)
    done = 1
  end
  replies[i + 1] = done
end
return replies
