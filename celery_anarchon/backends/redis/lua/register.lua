-- Note that jobs are scheduled, with a timetable of this fingerprint.
-- KEYS, for each: the job's records, the job's slots.
-- ARGV: how many fingerprints to keep; then for each: fingerprint.
-- Reply, for each: since (digits), the highest slot known (digits; empty: none).
local now = clock()
local kept = tonumber(ARGV[1])
local replies = {}
for i = 0, #KEYS / 2 - 1 do
  local runs, slots, fingerprint = KEYS[2 * i + 1], KEYS[2 * i + 2], ARGV[i + 2]
  local known = redis.call('HMGET', runs, 'sights', 'floor')
  -- Pairs of fingerprint and since; the one that was sighted last stands last.
  local sights = known[1] and cjson.decode(known[1]) or {}
  local since = now
  if #sights == 0 or sights[#sights][1] ~= fingerprint then
    for j, sight in ipairs(sights) do
      if sight[1] == fingerprint then
        since = sight[2]
        table.remove(sights, j)
        break
      end
    end
    sights[#sights + 1] = { fingerprint, since }
    while #sights > kept do
      table.remove(sights, 1)
    end
    redis.call('HSET', runs, 'sights', cjson.encode(sights))
  else
    since = sights[#sights][2]
  end
  local last = redis.call('ZREVRANGE', slots, 0, 0)[1] or ''
  if known[2] and (last == '' or tonumber(known[2]) > tonumber(last)) then
    last = known[2]
  end
  replies[2 * i + 1], replies[2 * i + 2] = digits(since), last
end
return replies
