"""A clock that moves only when a test says so."""

from __future__ import annotations

from celery_anarchon.model import Millis


class ManualClock:
    """Both readings of a :class:`~celery_anarchon.clock.Clock`, moved by hand."""

    def __init__(self, wall: Millis = 0, monotonic: float = 0.0) -> None:
        self._wall = wall
        self._monotonic = monotonic

    def wall(self) -> Millis:
        return self._wall

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, span: Millis) -> None:
        """Time passes: both readings move."""
        self._wall += span
        self._monotonic += span / 1000

    def step(self, span: Millis) -> None:
        """Somebody sets the wall clock: only that one moves."""
        self._wall += span
