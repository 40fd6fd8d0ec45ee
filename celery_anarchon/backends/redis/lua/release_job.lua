-- A person's command: settle every unsettled run of a job but a waiting one.
-- KEYS: see common.
-- ARGV: job.
-- Reply, for what was settled: slot, record (JSON).
local now = clock()
local replies = {}
for _, slot in ipairs(redis.call('ZRANGE', KEYS[4], 0, -1)) do
  local row = look(0, ARGV[1], slot)
  if row.lives then
    settle(row, now, 'lost', 'released')
    replies[#replies + 1] = slot
    replies[#replies + 1] = cjson.encode(row.run)
  else
    redis.call('ZREM', row.living, slot)
  end
end
return replies
