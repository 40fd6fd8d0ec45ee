-- Claims and runs that a sweeper may go on with, longest lapsed first. Writes nothing. One range of each shard's leases: the cost does not
-- grow with jobs or with settled runs.
-- KEYS: the leases of the shards.
-- ARGV: limit.
-- Reply, for each: since when a sweeper may (digits), slot:attempt:mark:job.
local now = clock()
local limit = tonumber(ARGV[1])
local over = {}
if limit > 0 then
  for _, leases in ipairs(KEYS) do
    local found = redis.call('ZRANGEBYSCORE', leases, '-inf', digits(now), 'WITHSCORES', 'LIMIT', 0, limit)
    for i = 1, #found, 2 do
      over[#over + 1] = { found[i], tonumber(found[i + 1]) }
    end
  end
end
table.sort(over, function(one, other)
  if one[2] ~= other[2] then
    return one[2] < other[2]
  end
  return one[1] < other[1]
end)

local replies = {}
for i = 1, math.min(limit, #over) do
  replies[2 * i - 1], replies[2 * i] = digits(over[i][2]), over[i][1]
end
return replies
