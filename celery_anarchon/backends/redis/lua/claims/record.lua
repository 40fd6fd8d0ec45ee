-- Note slots that never became a run; never over a record. Claims are not touched.
-- KEYS, for each: the job's records, the job's slots.
-- ARGV, for each: slot, state, reason (optional), beat.
-- Reply, for each: 1 written, 0 not.
local now = clock()
local replies = {}
for i = 0, #KEYS / 2 - 1 do
  local runs, slots, a = KEYS[2 * i + 1], KEYS[2 * i + 2], 4 * i
  local slot = ARGV[a + 1]
  local done = 0
  if not read(runs, slot) then
    make(runs, slots, slot, {
      state = ARGV[a + 2], reason = optional(ARGV[a + 3]), beat = ARGV[a + 4], attempt = 1, ended_at = now,
    })
    done = 1
  end
  replies[i + 1] = done
end
return replies
