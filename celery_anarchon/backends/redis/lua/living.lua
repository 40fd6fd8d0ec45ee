-- The unsettled runs of a job, with the slot that waits. Writes nothing.
-- KEYS: the job's records, its living slots.
-- ARGV: none.
-- Reply: slot, record (JSON), slot, record, ...
local replies = {}

local function add(slots)
  local records = redis.call('HMGET', KEYS[1], unpack(slots))
  for i, slot in ipairs(slots) do
    if records[i] then
      replies[#replies + 1] = slot
      replies[#replies + 1] = records[i]
    end
  end
end

local waits = redis.call('HGET', KEYS[1], 'waiting')
if waits then
  add({ waits })
end
local first = 0
while true do
  local slots = redis.call('ZRANGE', KEYS[2], first, first + 499)
  if #slots == 0 then
    return replies
  end
  add(slots)
  first = first + #slots
end
