-- What stands before every script here. Units: instants and durations are milliseconds.
--
-- A record is JSON in the hash of its job, under its slot; a field that does not apply is left out, never null. Its
-- lease, or the limit of its wait in a queue, is not in it but in the shard's sorted set of leases, and nowhere else:
-- member SLOT:ATTEMPT:MARK:JOB, score: the instant at which a sweeper may go on with it, which is its end and the
-- record's `patience` after it. The mark says what a list of lapsed ones must say (see `lease`). So a look for them
-- needs no key that it could not declare.
--
-- Beside its records a job has the sorted set of the slots that are claimed, queued, running or retrying, and in the
-- field `waiting` of their hash the one slot that waits for the end of those. While there are none of them it is `free`:
-- SLOT:JOB in the shard's sorted set of these, by slot.
--
-- The keys of each row of a batch: the shard's leases, the job's records, the job's slots, its living ones, the shard's
-- free ones. Only `claim` has another order.

local LIVES = { claimed = '', queued = 'q', running = 'r', retrying = 't' }

local function clock()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Digits, always: tostring would write large numbers with an exponent.
local function digits(number)
  return string.format('%.0f', number)
end

local function closed(floor, slot)
  return floor and tonumber(slot) <= tonumber(floor)
end

local function write(runs, slot, run)
  redis.call('HSET', runs, slot, cjson.encode(run))
end

-- Where this run stands among the leases. Its mark: h, a beat's name is on it, or a, none is; then nothing, it is
-- claimed, or q queued, t retrying, r running, s running until its worker stopped; then how many attempts it may have.
local function lease(job, slot, run)
  local state = LIVES[run.state]
  if state == 'r' and run.reason == 'worker-stopped' then
    state = 's'
  end
  local most = run.terms and run.terms.max_attempts
  local mark = (run.owner and 'h' or 'a') .. state .. (most and digits(most) or '')
  return slot .. ':' .. digits(run.attempt) .. ':' .. mark .. ':' .. job
end

-- What the store has of this row's (job, slot).
local function fill(row)
  local slot = row.slot
  local known = redis.call('HMGET', row.runs, 'floor', 'waiting', slot)
  row.floor, row.waits = known[1], known[2]
  if known[3] then
    row.run = cjson.decode(known[3])
    row.lives = LIVES[row.run.state] ~= nil
    row.lease = row.lives and lease(row.job, slot, row.run)
  end
  return row
end

-- What the store has of a (job, slot), the number `i` of the batch, counted from 0.
local function look(i, job, slot)
  local k = 5 * i
  return fill({
    leases = KEYS[k + 1], runs = KEYS[k + 2], slots = KEYS[k + 3], living = KEYS[k + 4], free = KEYS[k + 5],
    job = job, slot = slot,
  })
end

-- Another run of the row's job that is queued, running or retrying: the slot of the oldest; and whether one is claimed.
local function others(row)
  local claimed, first = false, 0
  while true do
    local slots = redis.call('ZRANGE', row.living, first, first + 49)
    if #slots == 0 then
      return nil, claimed
    end
    local records = redis.call('HMGET', row.runs, unpack(slots))
    for i, slot in ipairs(slots) do
      local run = records[i] and cjson.decode(records[i])
      if not (run and LIVES[run.state]) then
        -- Deleted by hand. It must not stand in the way for ever.
        redis.call('ZREM', row.living, slot)
        first = first - 1
      elseif slot == row.slot then
        -- Itself.
      elseif run.state ~= 'claimed' then
        return slot, claimed
      else
        claimed = true
      end
    end
    first = first + #slots
  end
end

-- The slot that waited does so no more.
local function waits_no_more(row)
  redis.call('HDEL', row.runs, 'waiting')
  redis.call('ZREM', row.free, row.waits .. ':' .. row.job)
  row.waits = nil
end

local function alone(row)
  local published, claimed = others(row)
  return not (published or claimed)
end

-- The row's record is in that state now, and leased, or waiting in a queue, `till` then.
local function put(row, state, till, patience)
  local run, before = row.run, row.lease
  run.state, run.patience = state, patience
  row.lease = till and lease(row.job, row.slot, run)
  if before and before ~= row.lease then
    redis.call('ZREM', row.leases, before)
  end
  if till then
    redis.call('ZADD', row.leases, digits(till + (patience or 0)), row.lease)
  end
  write(row.runs, row.slot, run)
  local lived, lives = row.lives, LIVES[state] ~= nil
  row.lives = lives
  if lives and not lived then
    redis.call('ZADD', row.living, row.slot, row.slot)
    if row.waits then
      redis.call('ZREM', row.free, row.waits .. ':' .. row.job)
    end
  elseif lived and not lives then
    redis.call('ZREM', row.living, row.slot)
    if row.waits and alone(row) then
      redis.call('ZADD', row.free, row.waits, row.waits .. ':' .. row.job)
    end
  end
end

-- This is the record of a slot that had none; it is yet to be put somewhere.
local function name(row, run)
  row.run = run
  redis.call('ZADD', row.slots, row.slot, row.slot)
end

local function make(row, run)
  name(row, run)
  put(row, run.state)
end

-- Its message is in its queue.
local function published(row, now, late, delay)
  local run = row.run
  -- Those of the first publish: a later attempt leaves them.
  if not run.sent_at then
    run.sent_at, run.late = now, late
  end
  if run.terms then
    put(row, 'queued', now + delay + run.terms.queue_timeout)
  else
    put(row, 'dispatched')
  end
end

local function settle(row, now, state, reason)
  row.run.ended_at, row.run.reason = now, reason
  put(row, state)
end

-- When a sweeper may go on with it, and when its lease was over; nil: it has none.
local function ends(row)
  local score = row.lease and redis.call('ZSCORE', row.leases, row.lease)
  if score then
    return tonumber(score), tonumber(score) - (row.run.patience or 0)
  end
end

local function attempts_left(run)
  local most = run.terms and run.terms.max_attempts
  return most and run.attempt < most
end

-- The record is gone, by eviction or by hand, and its lease would stand at the head of the list for ever.
local function forget(row, now)
  local over = redis.call('ZRANGEBYSCORE', row.leases, '-inf', digits(now), 'LIMIT', 0, 1000)
  for _, member in ipairs(over) do
    local slot, job = string.match(member, '^([^:]*):[^:]*:[^:]*:(.*)$')
    if slot == row.slot and job == row.job then
      redis.call('ZREM', row.leases, member)
    end
  end
end

local function ended_by(run, owner, attempt)
  return run and run.owner == owner and run.attempt == tonumber(attempt)
end

local function held_by(run, owner, attempt)
  return run and run.state == 'claimed' and ended_by(run, owner, attempt)
end

-- The fence of what workers write.
local function run_ended_by(run, attempt, retries, token)
  return run and run.attempt == tonumber(attempt) and (run.retries or 0) == tonumber(retries) and run.token == token
end

local function run_by(run, attempt, retries, token)
  return run and run.state == 'running' and run_ended_by(run, attempt, retries, token)
end

-- An optional text comes as '=' and the text, or as '-'.
local function optional(given)
  if string.sub(given, 1, 1) == '=' then
    return string.sub(given, 2)
  end
end

-- The body of the row number `i`, counted from 0, has ended, say the arguments from ARGV[a] on: job, slot, attempt,
-- retries, token, state, reason (optional). 1 so recorded, 0 refused.
local function body_ended(i, a, now)
  local state = ARGV[a + 5]
  local row = look(i, ARGV[a], ARGV[a + 1])
  if not run_ended_by(row.run, ARGV[a + 2], ARGV[a + 3], ARGV[a + 4]) then
    return 0
  end
  if row.run.state == 'running' then
    settle(row, now, state, optional(ARGV[a + 6]))
  end
  return row.run.state == state and 1 or 0
end

