-- Slots that waited for the end of other runs of their job, of which none is left; oldest first. Writes nothing. One
-- range of each shard's free ones: the cost does not grow with jobs, nor with what else waits.
-- KEYS: the free ones of the shards.
-- ARGV: limit.
-- Reply: slot:job, slot:job, ...
local limit = tonumber(ARGV[1])
local found = {}
if limit > 0 then
  for _, free in ipairs(KEYS) do
    for _, member in ipairs(redis.call('ZRANGE', free, 0, limit - 1)) do
      found[#found + 1] = { member, tonumber(string.match(member, '^[^:]*')) }
    end
  end
end
table.sort(found, function(one, other)
  if one[2] ~= other[2] then
    return one[2] < other[2]
  end
  return one[1] < other[1]
end)

local replies = {}
for i = 1, math.min(limit, #found) do
  replies[i] = found[i][1]
end
return replies
