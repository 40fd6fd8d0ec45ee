"""Whether something is away, told once per change, and when to look again."""

from __future__ import annotations

from celery_anarchon.clock import Clock

FIRST_WAIT = 0.5
LONGEST_WAIT = 5.0


class Outage:
    """The state of one neighbour (store, broker). Waits between looks grow from 0.5 to 5 s."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wait = FIRST_WAIT
        self._look_at = 0.0
        self._since = 0.0
        self.away = False

    def failed(self) -> bool:
        """It did not answer. True: that is news."""
        news = not self.away
        self._wait = FIRST_WAIT if news else min(self._wait * 2, LONGEST_WAIT)
        now = self._clock.monotonic()
        self._since = now if news else self._since
        self._look_at = now + self._wait
        self.away = True
        return news

    def answered(self) -> float:
        """It answers; for how many seconds it was away."""
        self.away = False
        return self._clock.monotonic() - self._since

    def remaining(self) -> float:
        """Seconds until it is time to look again; 0 when it is."""
        return max(0.0, self._look_at - self._clock.monotonic()) if self.away else 0.0
