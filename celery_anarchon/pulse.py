"""Since when this process has been working without a break, and what its clocks did meanwhile."""

from __future__ import annotations

from celery_anarchon import events
from celery_anarchon.clock import Clock
from celery_anarchon.model import Millis

STALL: Millis = 5_000
"""A longer silence than this, unasked for, means that the process (or its host) was paused: what fell due meanwhile is
missed. A shorter one is a slow moment, in which every slot is still sent in its turn."""

STEP: Millis = 1_000
"""How far the wall clock may stray from the monotonic one before it counts as set."""


class Pulse:
    """Watches for pauses and for clocks that were set."""

    def __init__(self, clock: Clock, fanout: events.Fanout) -> None:
        self._clock = clock
        self._fanout = fanout
        self._expected_pause = 0.0
        self.working_since = self._wall = clock.wall()
        self._monotonic = clock.monotonic()

    def restart(self) -> None:
        """Work begins (anew) now: what fell due before was missed."""
        self.working_since = self._clock.wall()

    def excuse(self) -> None:
        """Forget the time since the last look: it was spent on purpose."""
        self._wall, self._monotonic = self._clock.wall(), self._clock.monotonic()

    def resting(self, seconds: float) -> None:
        """The next look is expected only after so many seconds."""
        self._expected_pause = seconds

    def look(self) -> Millis:
        """Called at every step of the work: a gap that nobody asked for, or a clock that jumped, starts it anew. By how
        much the clock jumped; 0: it did not."""
        wall, monotonic = self._clock.wall(), self._clock.monotonic()
        elapsed = monotonic - self._monotonic
        pause = round((elapsed - self._expected_pause) * 1000)
        step = wall - self._wall - round(elapsed * 1000)
        self._wall, self._monotonic, self._expected_pause = wall, monotonic, 0.0
        if pause > STALL:
            self.working_since = wall
            self._fanout.emit(events.Stalled(pause=pause))
        if abs(step) > STEP:
            # Forward: the slots in between were missed. Backward: they are decided already, and stay so.
            self.working_since = wall
            self._fanout.emit(events.ClockStepped(step=step))
            return step
        return 0
