-- What is decided about slots, without asking for them. Writes nothing.
-- KEYS, for each: the job's records.
-- ARGV: who asks; then for each: slot.
-- Reply: a text with a word for each: as claim's where no claim would change that; else '-'.
local replies = {}
for i, runs in ipairs(KEYS) do
  local slot = ARGV[i + 1]
  local known = redis.call('HMGET', runs, 'floor', slot)
  local answer, attempt
  if closed(known[1], slot) then
    answer, attempt = 'too-old', 1
  elseif known[2] then
    local run = cjson.decode(known[2])
    if run.state == 'waiting' then
      -- Perhaps its turn has come.
    elseif run.owner ~= ARGV[1] then
      answer, attempt = 'taken', 1
    elseif run.state ~= 'claimed' then
      answer, attempt = 'already-sent', run.attempt
    end
  end
  replies[i] = answer and answer .. ',' .. attempt .. ',0' or '-'
end
return table.concat(replies, ' ')
