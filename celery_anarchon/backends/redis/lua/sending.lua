-- What stands behind `common` before the scripts that put messages into queues with their claims.
--
-- A message comes as: how many commands it has; where there are any: what its header calls the attempt, late, delay of
-- its ETA; then for each command: how many words, the words.

-- The message at ARGV[a], or nil; and where the arguments go on.
local function message_at(a)
  local count = tonumber(ARGV[a])
  if count == 0 then
    return nil, a + 1
  end
  local message = {
    attempt = tonumber(ARGV[a + 1]), late = tonumber(ARGV[a + 2]), delay = tonumber(ARGV[a + 3]), commands = {},
  }
  a = a + 4
  for i = 1, count do
    local words = tonumber(ARGV[a])
    local command = {}
    for j = 1, words do
      command[j] = ARGV[a + j]
    end
    message.commands[i] = command
    a = a + words + 1
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

