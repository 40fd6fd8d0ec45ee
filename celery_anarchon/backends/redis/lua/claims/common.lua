-- What stands before every script here. Units: instants and durations are milliseconds.
--
-- A claim is what the strategy makes it; beside it a slot has a record: JSON in the hash of its job, under its slot, and
-- the slot in the sorted set of the job's slots. A field that does not apply is left out, never null.
--
-- The keys of each row of a batch: the job's records, the job's slots.

local function clock()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Digits, always: tostring would write large numbers with an exponent.
local function digits(number)
  return string.format('%.0f', number)
end

local function read(runs, slot)
  local found = redis.call('HGET', runs, slot)
  return found and cjson.decode(found)
end

local function write(runs, slot, run)
  redis.call('HSET', runs, slot, cjson.encode(run))
end

local function make(runs, slots, slot, run)
  write(runs, slot, run)
  redis.call('ZADD', slots, slot, slot)
end

local function ended_by(run, owner, attempt)
  return run and run.owner == owner and run.attempt == tonumber(attempt)
end

local function held_by(run, owner, attempt)
  return run and run.state == 'claimed' and ended_by(run, owner, attempt)
end

-- An optional text comes as '=' and the text, or as '-'.
local function optional(given)
  if string.sub(given, 1, 1) == '=' then
    return string.sub(given, 2)
  end
end

-- This owner has the claim: what its record says of it. One that only noted the slot gives way to the claim.
local function mine(runs, slots, slot, owner, beat, now)
  local run = read(runs, slot)
  if run and run.owner == owner then
    return run.state == 'claimed' and 'won' or 'already-sent'
  end
  make(runs, slots, slot, { state = 'claimed', owner = owner, attempt = 1, claimed_at = now, beat = beat })
  return 'won'
end
