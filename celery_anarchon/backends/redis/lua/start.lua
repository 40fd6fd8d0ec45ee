-- Some bodies have ended; and then: may these deliveries execute theirs? The order of the questions is the contract's.
-- KEYS, for each that has ended, and then for each that asks: see common.
-- ARGV: how many have ended; for each of those: see body_ended; for each that asks: job, slot, attempt and retries of
--   the message, token, worker, terms (JSON), '1': acknowledges late, late (empty: not known), beat.
-- Reply: one text, for a list is read word by word. For each that has ended '1' so recorded, '0' refused; then for each
--   that asks answer, attempt, who holds it (optional; what may be misread as %XX), a space before each of the three.
local now = clock()
local told, answers = {}, {}

local function judge(run, attempt, retries, token)
  local running = run.state == 'running'
  if running and run.token == token and (run.retries or 0) == retries then
    return 'start'
  end
  if not LIVES[run.state] and run.state ~= 'dispatched' and run.state ~= 'waiting' then
    return 'settled'
  end
  -- Attempts that are not counted are granted to redeliveries of one message, which says what it always said.
  local redelivered = running and not run.terms.max_attempts and retries <= (run.retries or 0)
  if attempt < run.attempt and not redelivered then
    return 'stale'
  end
  if run.state == 'claimed' or run.state == 'queued' or run.state == 'dispatched' then
    return 'start'
  end
  if retries > (run.retries or 0) and run.state ~= 'waiting' then
    return 'start'
  end
  return running and 'lapsed?' or 'duplicate'
end

local function run_it(row, attempt, retries, token, worker, given)
  local run = row.run
  local again = false
  if not run then
    run = { attempt = attempt, beat = given.beat }
    name(row, run)
  elseif run.state == 'running' then
    again = run.token == token
    if not again and retries <= (run.retries or 0) then
      run.attempt = run.attempt + 1
    end
  end
  run.attempt = math.max(run.attempt, attempt)
  run.terms = run.terms or cjson.decode(given.terms)
  run.retries, run.token, run.worker = retries, token, worker
  run.reason, run.ended_at = nil, nil
  if not again then
    run.started_at = now
  end
  if not run.sent_at then
    run.sent_at, run.late = now, tonumber(given.late)
  end
  local patience = given.acks_late and not run.terms.max_attempts and run.terms.queue_timeout or nil
  put(row, 'running', now + run.terms.lease, patience)
  return run.attempt
end

local function start(row, attempt, retries, token, worker, given)
  local run = row.run
  if not run and closed(row.floor, row.slot) then
    return 'trimmed', 1
  end
  local answer = run and judge(run, attempt, retries, token) or 'unknown'
  if answer == 'lapsed?' then
    local _, over = ends(row)
    if not over or over > now then
      answer = 'duplicate'
    elseif run.terms.max_attempts and not attempts_left(run) then
      answer = 'used-up'
    else
      answer = 'start'
    end
  end
  if answer == 'start' or answer == 'unknown' then
    local unguarded = not run or (run.state == 'dispatched' and run.reason)
    if not (unguarded and cjson.decode(given.terms).overlap ~= 'allow' and not alone(row)) then
      return answer, run_it(row, attempt, retries, token, worker, given)
    end
    answer = 'overlaps'
  end
  if not run then
    return answer, 1
  end
  run.refused = (run.refused or 0) + 1
  if answer == 'used-up' then
    settle(row, now, 'lost', 'attempts-used-up')
  else
    write(row.runs, row.slot, run)
  end
  return answer, run.attempt, answer == 'duplicate' and run.worker
end

local function plain(text)
  return (string.gsub(text, '[^%w._-]', function(char) return string.format('%%%02X', string.byte(char)) end))
end

local ended = tonumber(ARGV[1])
for i = 0, ended - 1 do
  told[i + 1] = body_ended(i, 7 * i + 2, now)
end
for i = ended, #KEYS / 5 - 1 do
  local a = 7 * ended + 10 * (i - ended) + 1
  local row = look(i, ARGV[a + 1], ARGV[a + 2])
  local given = {
    terms = ARGV[a + 7], acks_late = ARGV[a + 8] == '1', late = ARGV[a + 9], beat = ARGV[a + 10],
  }
  local answer, attempt, holder = start(
    row, tonumber(ARGV[a + 3]), tonumber(ARGV[a + 4]), ARGV[a + 5], ARGV[a + 6], given)
  answers[i - ended + 1] = ' ' .. answer .. ' ' .. attempt .. ' ' .. (holder and '=' .. plain(holder) or '-')
end
return table.concat(told) .. table.concat(answers)
