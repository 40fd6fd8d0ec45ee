-- What stands before every script here. Units: instants and durations are milliseconds.
--
-- A record is JSON in the hash of its job, under its slot; a field that does not apply is left out, never null. Its
-- lease is not in it but in the shard's sorted set of leases, and nowhere else: member SLOT:ATTEMPT:MARK:JOB (mark h:
-- held, a: abandoned), score: the instant of its end. So a look for lapsed claims needs no key that it could not
-- declare.

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

local function read(runs, slot)
  local found = redis.call('HGET', runs, slot)
  return found and cjson.decode(found)
end

local function write(runs, slot, run)
  redis.call('HSET', runs, slot, cjson.encode(run))
end

local function lease(job, slot, run)
  return slot .. ':' .. digits(run.attempt) .. ':' .. (run.owner and 'h' or 'a') .. ':' .. job
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

