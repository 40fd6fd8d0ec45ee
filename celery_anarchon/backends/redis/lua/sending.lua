-- What stands behind `common` before the scripts that put messages into queues.
--
-- A message is a form, which many have in common, and what is its own. Forms come first: how many; for each: what the
-- header calls the attempt, the delay of the ETA, how many commands; for each command: how many words, 1: a payload
-- goes behind them, the words. A message then is: the number of its form, or 0, there is none; where there is one: late,
-- and the payloads.

-- The forms at ARGV[a]; and where the arguments go on.
local function forms_at(a)
  local forms = {}
  local count = tonumber(ARGV[a])
  a = a + 1
  for f = 1, count do
    local form = { attempt = tonumber(ARGV[a]), delay = tonumber(ARGV[a + 1]), commands = {}, payloads = {} }
    local commands = tonumber(ARGV[a + 2])
    a = a + 3
    for i = 1, commands do
      local words = tonumber(ARGV[a])
      local command = {}
      for j = 1, words do
        command[j] = ARGV[a + 1 + j]
      end
      form.commands[i] = command
      form.payloads[i] = ARGV[a + 1] == '1' and words + 1
      a = a + words + 2
    end
    forms[f] = form
  end
  return forms, a
end

-- The message at ARGV[a], or nil; and where the arguments go on. It is good until the next one of its form is read.
local function message_at(forms, a)
  local message = forms[tonumber(ARGV[a])]
  if not message then
    return nil, a + 1
  end
  message.late = tonumber(ARGV[a + 1])
  a = a + 2
  for i, command in ipairs(message.commands) do
    local place = message.payloads[i]
    if place then
      command[place] = ARGV[a]
      a = a + 1
    end
  end
  return message, a
end

-- Keys that were seen to take a message. A script looks once at each: nobody else writes meanwhile.
local takes = {}

local function fits(command)
  local key = command[2]
  if command[1] ~= 'LPUSH' or takes[key] then
    return true
  end
  local kind = redis.pcall('TYPE', key)
  kind = kind.ok
  takes[key] = kind == 'none' or kind == 'list'
  return takes[key]
end

-- Write a message, or nothing of it.
local function enqueue(message)
  for i, command in ipairs(message.commands) do
    local reply = redis.pcall(unpack(command))
    if type(reply) == 'table' and reply.err then
      -- What is pushed in a script is popped by nobody before its end.
      for j = 1, i - 1 do
        if message.commands[j][1] == 'LPUSH' then
          redis.call('LPOP', message.commands[j][2])
        end
      end
      return false
    end
  end
  return true
end

local function writable(message)
  for _, command in ipairs(message.commands) do
    if not fits(command) then
      return false
    end
  end
  return true
end

-- The run is this row's, and its message is not out. True: it is now, and the run is what `confirm` makes of it; else
-- nothing of the message is, and the caller puts the run where it belongs.
--
-- The record comes first: a server that takes no writes ends the script there, before there is a message.
local function send(row, now, message)
  local run = row.run
  if not (message and message.attempt == run.attempt and writable(message)) then
    return false
  end
  local sent_at, late = run.sent_at, run.late
  published(row, now, message.late, message.delay)
  if enqueue(message) then
    return true
  end
  run.sent_at, run.late = sent_at, late
  return false
end

