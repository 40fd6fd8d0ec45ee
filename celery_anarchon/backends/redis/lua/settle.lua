-- Bodies have ended.
-- KEYS, for each: see common.
-- ARGV, for each: see body_ended.
-- Reply, for each: 1 so recorded, 0 refused.
local now = clock()
local replies = {}
for i = 0, #KEYS / 5 - 1 do
  replies[i + 1] = body_ended(i, 7 * i + 1, now)
end
return replies
