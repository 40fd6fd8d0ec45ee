"""How far this host's clock is from the store's, what a beat does about it, and by which clock it judges slots.

A beat whose clock is further off than ``anarchon_max_skew`` names wrong slots: too early ones it claims in vain, late
ones it sends late, and what lies between its clock and the store's it would count as missed. So it leaves the slots to
the beats whose clocks are right. Where there is no such beat, slots follow the store's clock, which all of them share.

Belongs here: measuring, and the decision. Does not belong here: who lives (:mod:`.roster`), and what stopping means for
the schedule (:mod:`.dispatcher`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable

from celery_anarchon import events
from celery_anarchon.clock import Clock
from celery_anarchon.model import Millis
from celery_anarchon.pulse import STEP

CLEAR = 0.5
"""Seconds that a store may take to tell its time, for that time to be followed."""


class Standing(enum.Enum):
    """What this beat's clock is good for."""

    OWN = enum.auto()
    """It is right, or cannot be compared: slots follow it."""
    BARRED = enum.auto()
    """It is wrong, and another beat's is right: this beat claims nothing."""
    FOLLOWING = enum.auto()
    """It is wrong, and so is everybody's: slots follow the store's."""


class FleetClock:
    """The clock that slots are judged by: this host's, or the store's carried on by the monotonic one."""

    def __init__(self, host: Clock, fanout: events.Fanout, limit: Millis) -> None:
        self._host = host
        self._fanout = fanout
        self._limit = limit
        self._reported: Millis = 0
        self._doubt: Millis = 0
        self._store: tuple[Millis, float] = (host.wall(), host.monotonic())
        self._slept = 0.0
        self.skew: Millis = 0
        """This host's wall clock minus the store's, as it was last measured."""
        self.standing = Standing.OWN
        self.right_until: Millis | None = None
        """Store time at which another beat with the right clock was last seen; None: this beat relied on none."""

    def wall(self) -> Millis:
        if self.standing is Standing.FOLLOWING:
            store, since = self._store
            return store + round((self._host.monotonic() - since) * 1000)
        return self._host.wall()

    def monotonic(self) -> float:
        return self._host.monotonic() + self._slept

    def slept(self, span: Millis) -> None:
        """So much time passed that the host's monotonic clock did not count, or may have."""
        self._slept += span / 1000

    def store_time(self) -> Millis:
        """What the store's clock says now, as far as it was compared."""
        return self._host.wall() - self.skew

    def compare(self, ask: Callable[[], Millis]) -> None:
        """Measure the skew; *ask* tells the store's time."""
        begun = self._host.monotonic()
        store = ask()
        ended = self._host.monotonic()
        half = (ended - begun) / 2
        # Any moment of the call may be the one at which the store looked at its clock.
        self._doubt = round(half * 1000)
        self.skew = self._host.wall() - self._doubt - store
        if half < CLEAR or self.standing is not Standing.FOLLOWING:
            self._store = (store, begun + half)
        if abs(self.skew) > STEP and abs(self.skew - self._reported) > STEP:
            self._reported = self.skew
            self._fanout.emit(events.SkewSeen(skew=self.skew))

    def decide(self, others: Iterable[tuple[Millis, Millis]]) -> bool:
        """Take a standing; whether it is a new one.

        :param others: of each other beat that lives, its skew and the store time at which it was seen.
        """
        right = [seen for skew, seen in others if abs(skew) <= self._limit]
        if right or self.standing is not Standing.BARRED:
            self.right_until = max(right, default=None)
        if abs(self.skew) - self._doubt <= self._limit:
            standing = Standing.OWN
        else:
            standing = Standing.BARRED if right else Standing.FOLLOWING
        if standing is self.standing:
            return False
        self.standing = standing
        if standing is Standing.OWN:
            self._fanout.emit(events.SkewWithin(skew=self.skew))
        else:
            following = standing is Standing.FOLLOWING
            self._fanout.emit(events.SkewBeyond(skew=self.skew, limit=self._limit, following=following))
        return True
