"""Whether something is away, told once per change, and when to look again."""

from __future__ import annotations

import math

from celery_anarchon.clock import Clock
from celery_anarchon.errors import BackendUnavailable, OutcomeUnknown

FIRST_WAIT = 0.5
LONGEST_WAIT = 4.0
"""Shorter than the pause after which slots count as missed: one look that fails makes none of them so."""


class Outage:
    """The state of one neighbour (store, broker). Waits between looks grow from 0.5 to 4 s.

    To be there is not to work: a server without memory answers the question whether it is there, and takes no write. So
    an outage goes on until work was done, or until it was reachable for as long as the longest wait. While a line loses
    an answer now and then, work is done in between: there waits do not grow.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wait = FIRST_WAIT
        self._look_at = 0.0
        self._since = 0.0
        self._reachable_at = -math.inf
        self._worked = False
        """Since it last failed."""
        self._told: set[type[BaseException]] = set()
        self.away = False
        """It is not to be asked for anything but whether it is there."""
        self.goes_on = False
        """It was away, and nobody knows yet whether it works again."""

    def failed(self, error: BaseException) -> bool:
        """It did not answer. True: that is news, or why is."""
        now = self._clock.monotonic()
        if not self.goes_on:
            self._told.clear()
        relapse = not self._worked and (self.goes_on or now - self._reachable_at < LONGEST_WAIT)
        self._worked = False
        self._wait = min(self._wait * 2, LONGEST_WAIT) if relapse else FIRST_WAIT
        self._since = self._since if self.away else now
        self._look_at = now + self._wait
        self.away = self.goes_on = True
        # Of one kind only the first: in one outage a server refuses, resets and is silent by turns.
        kind = BackendUnavailable if isinstance(error, OutcomeUnknown) else type(error)
        news = kind not in self._told
        self._told.add(kind)
        return news

    def reachable(self) -> float:
        """It is there, and may be asked to work; for how many seconds it was away."""
        self.away = False
        self._reachable_at = self._clock.monotonic()
        return self._reachable_at - self._since

    def worked(self) -> None:
        """It has done some of what it was asked for. Whether that is the end of the outage is seen later."""
        self._worked = True

    def answered(self) -> bool:
        """It works. True: that is news."""
        if self.away:
            self.reachable()
        news, self.goes_on = self.goes_on, False
        return news

    @property
    def lasts(self) -> bool:
        """It was not asked to work, but has been there for long enough."""
        at = self.next_at()
        return at is not None and self._clock.monotonic() >= at

    def next_at(self) -> float | None:
        """The monotonic time from when on that it is there will do for its work."""
        return self._reachable_at + LONGEST_WAIT if self.goes_on and not self.away else None

    def remaining(self) -> float:
        """Seconds until it is time to look again; 0 when it is."""
        return max(0.0, self._look_at - self._clock.monotonic()) if self.away else 0.0
