-- Write one message without a claim.
-- KEYS: any of the namespace.
-- ARGV: message (see sending).
-- Reply: 1 written, 0 refused.
local message = message_at(1)
return writable(message) and enqueue(message) and 1 or 0
