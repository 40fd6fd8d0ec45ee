"""What time it is. All that decides by time is handed a clock, so that a test can hand it another."""

from __future__ import annotations

import time
from typing import Protocol

from celery_anarchon.model import Millis


class Clock(Protocol):
    """Two readings. Wall time says which slots are due; monotonic time measures how long something took."""

    def wall(self) -> Millis:
        """This host's idea of UTC, in whole milliseconds. May jump."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment. Never jumps. Readings of one clock only compare with each other."""


_COUNTS_SLEEP: int | None = getattr(time, "CLOCK_BOOTTIME", None)
"""Linux: the monotonic clock that goes on while the host sleeps."""


class SystemClock:
    """The host's clocks."""

    def wall(self) -> Millis:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        # A lease goes on while this host sleeps, and so must what it is measured with.
        return time.monotonic() if _COUNTS_SLEEP is None else time.clock_gettime(_COUNTS_SLEEP)
