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
        """Seconds since some fixed moment. Never jumps."""


class SystemClock:
    """The host's clocks."""

    def wall(self) -> Millis:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()
