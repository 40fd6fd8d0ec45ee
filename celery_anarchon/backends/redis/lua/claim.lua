-- Claim slots.
-- KEYS, for each request: see common.
-- ARGV: tolerance; then for each request: job, slot, owner, beat, lease, terms (JSON; empty: none).
-- Reply, for each request: answer, attempt.
local now = clock()
local early = now + tonumber(ARGV[1])
local replies = {}

-- The slot that waited does so no more.
local function waits_no_more(row)
  redis.call('HDEL', row.runs, 'waiting')
  redis.call('ZREM', row.free, row.waits .. ':' .. row.job)
  row.waits = nil
end

-- Record what becomes of an open slot that may not overlap, and say so; nil: it may be claimed.
local function overlapping(row, terms, beat)
  local published, claimed = others(row)
  local skips = terms.overlap == 'skip'
  if skips and row.waits and (not published or tonumber(row.waits) < tonumber(published)) then
    published = row.waits
  end
  if claimed and not published then
    return 'wait'
  end
  local ended = { state = 'skipped', attempt = 1, ended_at = now, beat = beat }
  if skips then
    if not published then
      return nil
    end
    ended.reason, ended.blocked_by = 'overlap', published
    make(row, ended)
    return 'skipped'
  end
  if row.waits then
    ended.state, ended.reason = 'superseded', 'newer-slot'
    if tonumber(row.waits) > tonumber(row.slot) then
      make(row, ended)
      return 'skipped'
    end
    local older = redis.call('HGET', row.runs, row.waits)
    if older then
      local run = cjson.decode(older)
      run.state, run.reason, run.ended_at = 'superseded', 'newer-slot', now
      write(row.runs, row.waits, run)
    end
    waits_no_more(row)
  end
  if not published then
    return nil
  end
  make(row, {
    state = 'waiting', attempt = 1, claimed_at = now, beat = beat, terms = terms, blocked_by = published,
  })
  redis.call('HSET', row.runs, 'waiting', row.slot)
  return 'waiting'
end

local function claim(row, owner, beat, span, terms)
  if closed(row.floor, row.slot) then
    return 'too-old', 1
  end
  local till = now + tonumber(span)
  local run = row.run
  terms = terms ~= '' and cjson.decode(terms) or nil
  if not run then
    if tonumber(row.slot) > early then
      return 'too-early', 1
    end
    local held_up = terms and terms.overlap ~= 'allow' and overlapping(row, terms, beat)
    if held_up then
      return held_up, 1
    end
    make(row, { state = 'claimed', owner = owner, attempt = 1, claimed_at = now, beat = beat, terms = terms }, till)
    return 'won', 1
  end
  if run.state == 'waiting' then
    if not alone(row) then
      return 'waiting', 1
    end
    if row.waits == row.slot then
      waits_no_more(row)
    end
    run.owner, run.beat, run.claimed_at, run.terms = owner, beat, now, terms
  elseif run.owner ~= owner then
    return 'taken', 1
  elseif run.state ~= 'claimed' then
    return 'already-sent', run.attempt
  end
  put(row, 'claimed', till)
  return 'won', run.attempt
end

for i = 0, #KEYS / 5 - 1 do
  local a = 6 * i + 1
  local row = look(i, ARGV[a + 1], ARGV[a + 2])
  replies[2 * i + 1], replies[2 * i + 2] = claim(row, ARGV[a + 3], ARGV[a + 4], ARGV[a + 5], ARGV[a + 6])
end
return replies
