-- Claim slots, and write the messages that come with those that are won.
-- KEYS, for each request: the job's records, slots, living ones; then for each shard: its leases, its free ones.
-- ARGV: tolerance; how many requests; how many askers; for each of those: owner, beat, lease, terms (JSON; empty: none);
--   the forms of messages (see sending); then for each request: job, slot, number of its shard, of its asker, message.
-- Reply: a text with a word for each request: answer, attempt, 1: its message was written, commas between them.
local now = clock()
local early = now + tonumber(ARGV[1])
local replies = {}

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

local function claim(row, asker, message)
  if closed(row.floor, row.slot) then
    return 'too-old', 1
  end
  local owner, beat, till, terms = asker.owner, asker.beat, now + asker.span, asker.terms
  local run = row.run
  if not run then
    if tonumber(row.slot) > early then
      return 'too-early', 1
    end
    local held_up = terms and terms.overlap ~= 'allow' and overlapping(row, terms, beat)
    if held_up then
      return held_up, 1
    end
    run = { state = 'claimed', owner = owner, attempt = 1, claimed_at = now, beat = beat, terms = terms }
    name(row, run)
    if send(row, now, message) then
      return 'won', 1, 1
    end
    put(row, 'claimed', till)
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
    if send(row, now, message) then
      return 'won', run.attempt, 1
    end
  elseif run.owner ~= owner then
    return 'taken', 1
  elseif run.state ~= 'claimed' then
    return 'already-sent', run.attempt
  end
  put(row, 'claimed', till)
  return 'won', run.attempt
end

local count = tonumber(ARGV[2])
local askers, a = {}, 4
for i = 1, tonumber(ARGV[3]) do
  local terms = ARGV[a + 3]
  askers[i] = {
    owner = ARGV[a], beat = ARGV[a + 1], span = tonumber(ARGV[a + 2]), terms = terms ~= '' and cjson.decode(terms) or nil,
  }
  a = a + 4
end

local forms
forms, a = forms_at(a)
for i = 1, count do
  local k, shard = 3 * i, 3 * count + 2 * tonumber(ARGV[a + 2])
  local row = fill({
    runs = KEYS[k - 2], slots = KEYS[k - 1], living = KEYS[k], leases = KEYS[shard - 1], free = KEYS[shard],
    job = ARGV[a], slot = ARGV[a + 1],
  })
  local asker = askers[tonumber(ARGV[a + 3])]
  local message
  message, a = message_at(forms, a + 4)
  local answer, attempt, sent = claim(row, asker, message)
  replies[i] = answer .. ',' .. attempt .. ',' .. (sent or 0)
end
return table.concat(replies, ' ')
