-- Write one message without a claim.
-- KEYS: any of the namespace.
-- ARGV: forms, message (see sending).
-- Reply: 1 written, 0 refused.
local forms, a = forms_at(1)
local message = message_at(forms, a)
return writable(message) and enqueue(message) and 1 or 0
