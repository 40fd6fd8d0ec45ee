-- The latest records of a job, newest slot first. Writes nothing.
-- KEYS: the job's records, the job's slots.
-- ARGV: limit; '1': only records that stand for a message, '0': all; then the states that stand for none.
-- Reply: slot, record (JSON), slot, record, ...
local limit, sent_only = tonumber(ARGV[1]), ARGV[2] == '1'
-- In pieces, because Lua passes some thousand arguments at most, and the last run is mostly among the latest.
local piece = sent_only and 50 or math.min(limit, 500)
local without = {}
for i = 3, #ARGV do
  without[ARGV[i]] = true
end

local replies, first = {}, 0
while #replies < 2 * limit do
  local slots = redis.call('ZREVRANGE', KEYS[2], first, first + piece - 1)
  if #slots == 0 then
    break
  end
  local records = redis.call('HMGET', KEYS[1], unpack(slots))
  for i, slot in ipairs(slots) do
    local fits = records[i] and not (sent_only and without[cjson.decode(records[i]).state])
    if fits and #replies < 2 * limit then
      replies[#replies + 1] = slot
      replies[#replies + 1] = records[i]
    end
  end
  first = first + #slots
end
return replies
