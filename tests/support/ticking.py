"""Beats on a clock that a test moves: each ticks when it asked to, and no time passes otherwise."""

from __future__ import annotations

from collections.abc import Callable

from celery_anarchon.model import Millis
from celery_anarchon.testing.clock import ManualClock


def run_until(clock: ManualClock, end: Millis, *ticks: Callable[[], float], step: Millis | None = None) -> None:
    """Let all tick together, whenever the first of them asked to, up to and including *end*.

    :param step: the longest that none of them ticks.
    """
    while True:
        pause = max(1, round(min([tick() for tick in ticks]) * 1000))
        if step is not None:
            pause = min(step, pause)
        if clock.wall() + pause > end:
            clock.advance(end - clock.wall())
            for tick in ticks:
                tick()
            return
        clock.advance(pause)
