-- Claim slots by entries whose ids are the slots: a stream takes no id that is not greater than its last.
-- KEYS, for each request: the job's claims, the job's records, the job's slots.
-- ARGV: tolerance, how many entries to keep; then for each request, slots of a job in ascending order: slot, owner, beat.
-- Reply, for each request: answer; or what the server said, which is none.
local now = clock()
local early, kept = now + tonumber(ARGV[1]), ARGV[2]
local replies = {}

-- Nobody claimed it while it could be claimed. Where older entries are still there, its own would be as well.
local function passed_over(claims, runs, slots, slot, beat)
  local first = redis.call('XRANGE', claims, '-', '+', 'COUNT', 1)[1]
  if first and tonumber(string.match(first[1], '^%d+')) < tonumber(slot) and not read(runs, slot) then
    make(runs, slots, slot, { state = 'misfire', reason = 'too-old', beat = beat, attempt = 1, ended_at = now })
  end
  return 'too-old'
end

local function claim(claims, runs, slots, slot, owner, beat)
  local at = tonumber(slot)
  if at > early then
    return 'too-early'
  end
  if at <= 0 then
    return 'too-old'
  end
  -- Not slot-*: that would take a second entry for the slot.
  local id = digits(at) .. '-0'
  local reply = redis.pcall('XADD', claims, 'MAXLEN', '~', kept, id, 'o', owner)
  if type(reply) == 'table' and reply.err then
    if not string.find(reply.err, 'equal or smaller', 1, true) then
      return 'error ' .. reply.err
    end
    local entry = redis.call('XRANGE', claims, id, id)[1]
    if not entry then
      return passed_over(claims, runs, slots, slot, beat)
    end
    if entry[2][2] ~= owner then
      return 'taken'
    end
  end
  return mine(runs, slots, slot, owner, beat, now)
end

for i = 0, #KEYS / 3 - 1 do
  local k, a = 3 * i, 3 * i + 2
  replies[i + 1] = claim(KEYS[k + 1], KEYS[k + 2], KEYS[k + 3], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3])
end
return replies
