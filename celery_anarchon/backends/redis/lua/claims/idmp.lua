-- Claim slots by entries with an idempotency id, the slot: of two with one id the server keeps the first.
-- KEYS, for each request: the job's claims, the job's records, the job's slots.
-- ARGV: tolerance, IDMP-DURATION (s), IDMP-MAXSIZE, reach (how old a slot may be); then for each request: slot, owner,
-- beat.
-- Reply, for each request: answer. Or, before anything is written: 'other', duration, size and key of a stream that is
-- set otherwise.
local now = clock()
local early, oldest = now + tonumber(ARGV[1]), now - tonumber(ARGV[4])
local duration, size = ARGV[2], ARGV[3]
local replies = {}

-- How the stream is set; nil: it is not there.
local function settings(claims)
  if redis.call('EXISTS', claims) == 0 then
    return
  end
  local facts, found = redis.call('XINFO', 'STREAM', claims), {}
  for i = 1, #facts, 2 do
    found[facts[i]] = facts[i + 1]
  end
  return digits(found['idmp-duration']), digits(found['idmp-maxsize'])
end

local function claim(claims, runs, slots, slot, owner, beat)
  local at = tonumber(slot)
  if at > early then
    return 'too-early'
  end
  if at < oldest then
    return 'too-old'
  end
  if redis.call('EXISTS', claims) == 0 then
    -- XCFGSET wants a stream, and clears what it remembers: so between making it and the first entry, in one step.
    redis.call('XGROUP', 'CREATE', claims, 'init', '$', 'MKSTREAM')
    redis.call('XGROUP', 'DESTROY', claims, 'init')
    redis.call('XCFGSET', claims, 'IDMP-DURATION', duration, 'IDMP-MAXSIZE', size)
  end
  -- As many entries as ids are remembered: whose a claim is can be read as long as that it is one.
  local id = redis.call('XADD', claims, 'MAXLEN', '~', size, 'IDMP', 'cron', digits(at), '*', 'o', owner)
  local entry = redis.call('XRANGE', claims, id, id)[1]
  if not entry then
    -- Somebody else has trimmed it.
    return 'unknown'
  end
  if entry[2][2] ~= owner then
    return 'taken'
  end
  return mine(runs, slots, slot, owner, beat, now)
end

for i = 0, #KEYS / 3 - 1 do
  local known, most = settings(KEYS[3 * i + 1])
  if known and (known ~= duration or most ~= size) then
    return { 'other', known, most, KEYS[3 * i + 1] }
  end
end
for i = 0, #KEYS / 3 - 1 do
  local k, a = 3 * i, 3 * i + 4
  replies[i + 1] = claim(KEYS[k + 1], KEYS[k + 2], KEYS[k + 3], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3])
end
return replies
