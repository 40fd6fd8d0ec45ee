-- Drop what exceeds a job's history, oldest slot first, and raise the floor over it. The first record that stays ends
-- it: a floor above a slot that stays would close that slot.
-- KEYS, for each job: its records, its slots.
-- ARGV: how many records to drop at most; the unsettled states, joined by commas; then for each job: decided, history
--   size, history ttl (empty: none).
-- Reply: how many were dropped; 1: the bound ended it, ask again, 0: done.
local now = clock()
local bound, unsettled = tonumber(ARGV[1]), ',' .. ARGV[2] .. ','
local piece = 200
local dropped = 0

local function goes(record, slot, decided, aged_before, surplus)
  if tonumber(slot) > decided then
    return false
  end
  if not record then
    -- Evicted, or deleted by hand: only its slot is left.
    return true
  end
  local run = cjson.decode(record)
  if string.find(unsettled, ',' .. run.state .. ',', 1, true) then
    return false
  end
  local settled_at = run.ended_at or run.sent_at or run.claimed_at
  return surplus > 0 or (aged_before and settled_at < aged_before)
end

local function tidy(runs, slots, decided, size, ttl)
  local surplus = redis.call('ZCARD', slots) - size
  while dropped < bound do
    local wanted = math.min(piece, bound - dropped, math.max(surplus, ttl and 16 or 0))
    local oldest = wanted > 0 and redis.call('ZRANGE', slots, 0, wanted - 1) or {}
    if #oldest == 0 then
      return
    end
    local records = redis.call('HMGET', runs, unpack(oldest))
    local gone = {}
    for i, slot in ipairs(oldest) do
      if not goes(records[i], slot, decided, ttl and now - ttl, surplus) then
        break
      end
      gone[i] = slot
      surplus = surplus - 1
    end
    if #gone > 0 then
      redis.call('HSET', runs, 'floor', gone[#gone])
      redis.call('HDEL', runs, unpack(gone))
      redis.call('ZREM', slots, unpack(gone))
      dropped = dropped + #gone
    end
    if #gone < #oldest then
      return
    end
  end
end

for i = 0, #KEYS / 2 - 1 do
  local a = 3 * i + 2
  tidy(KEYS[2 * i + 1], KEYS[2 * i + 2], tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3]))
end
return { dropped, dropped < bound and 0 or 1 }
