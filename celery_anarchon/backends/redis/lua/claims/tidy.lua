-- Drop records beyond a job's history. Claims are not touched.
-- KEYS, for each: the job's records, the job's slots.
-- ARGV: how many to drop in this call at most; then for each: history_size, history_ttl or ''.
-- Reply: how many were dropped, '1': there are more.
local now, left = clock(), tonumber(ARGV[1])
-- A claim whose beat may still be busy with it.
local BUSY = 3600000
local dropped, more = 0, 0

local function ended(run)
  return math.max(run.claimed_at or 0, run.sent_at or 0, run.ended_at or 0)
end

for i = 0, #KEYS / 2 - 1 do
  local runs, slots, a = KEYS[2 * i + 1], KEYS[2 * i + 2], 2 * i + 1
  local size, ttl = tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2])
  local surplus = redis.call('ZCARD', slots) - size
  local first = 0
  while true do
    local some = redis.call('ZRANGE', slots, first, first + 499)
    if #some == 0 then
      break
    end
    local records, stayed = redis.call('HMGET', runs, unpack(some)), false
    for j, slot in ipairs(some) do
      local run = records[j] and cjson.decode(records[j])
      local over = surplus > 0 or (ttl and run and ended(run) < now - ttl)
      if not over then
        stayed = true
        break
      end
      if run and run.state == 'claimed' and run.claimed_at > now - BUSY then
        first, surplus = first + 1, surplus - 1
      elseif dropped == left then
        more = 1
        stayed = true
        break
      else
        redis.call('HDEL', runs, slot)
        redis.call('ZREM', slots, slot)
        dropped, surplus = dropped + 1, surplus - 1
      end
    end
    if stayed then
      break
    end
  end
end
return { dropped, more }
