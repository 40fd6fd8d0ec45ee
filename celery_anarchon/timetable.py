"""What a schedule means: the rule that yields slots.

Belongs here: the protocol that the rest of the package sees, and the rules that need no calendar. Does not belong here:
crontabs (:mod:`celery_anarchon.crontable`, reachable from here too), Celery's classes
(:mod:`celery_anarchon.schedules`).
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Protocol
from zoneinfo import ZoneInfo

from celery_anarchon.crontable import Cron, cron_from_fields, cron_from_text
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.model import Millis
from celery_anarchon.zones import wall_clock, zone_of

__all__ = [
    "At",
    "Chain",
    "Cron",
    "Interval",
    "Timetable",
    "at_instant",
    "cron_from_fields",
    "cron_from_text",
    "zone_of",
]

SHORTEST_INTERVAL: Millis = 100

_EPOCH = datetime(1970, 1, 1)
_UTC_EPOCH = _EPOCH.replace(tzinfo=timezone.utc)
_FIRST_INSTANT = (datetime.min - _EPOCH) // timedelta(milliseconds=1)
_LAST_INSTANT = (datetime.max - _EPOCH) // timedelta(milliseconds=1)


class Timetable(Protocol):
    """A rule that names instants, computed from the definition alone: pure, thread-safe, the same on every host."""

    @property
    def key(self) -> str:
        """Canonical text of the rule. Equal keys mean equal slots; its hash is the job's fingerprint."""

    def next(self, after: Millis) -> Millis | None:
        """The first slot strictly later than *after*; None when there is none. Independent of where one started."""

    def last(self, until: Millis) -> Millis | None:
        """The latest slot at or before *until*, computed, not enumerated to; None when there is none."""

    def count(self, after: Millis, until: Millis) -> int:
        """How many slots lie in (*after*, *until*], without listing them."""


class Interval:
    """Slots at ``offset + k * every`` from 1970-01-01T00:00Z, for every whole k."""

    __slots__ = ("_coming", "every", "key", "offset")

    def __init__(self, every_ms: Millis, offset_ms: Millis = 0) -> None:
        """
        :raises ConfigurationError: an interval below 0.1 s, zero or negative.
        """
        if every_ms < SHORTEST_INTERVAL:
            raise ConfigurationError(
                f"an interval of {every_ms / 1000:g} s is too short; the shortest is {SHORTEST_INTERVAL / 1000:g} s"
            )
        self.every = every_ms
        self.offset = offset_ms % every_ms
        self.key = f"interval {self.every} {self.offset}"
        self._coming: Millis = 0

    def __repr__(self) -> str:
        return f"<{self.key}>"

    def next(self, after: Millis) -> Millis:
        coming = after + self.every - (after - self.offset) % self.every
        told = self._coming
        if coming == told:
            # The very number that was told before: many jobs share this object, and each of them keeps it.
            return told
        self._coming = coming
        return coming

    def last(self, until: Millis) -> Millis:
        return until - (until - self.offset) % self.every

    def count(self, after: Millis, until: Millis) -> int:
        return max((until - self.offset) // self.every - (after - self.offset) // self.every, 0)


class At:
    """One slot, then none."""

    __slots__ = ("instant", "key")

    def __init__(self, instant_ms: Millis) -> None:
        self.instant = instant_ms
        self.key = f"at {instant_ms}"

    def __repr__(self) -> str:
        return f"<{self.key}>"

    def next(self, after: Millis) -> Millis | None:
        return self.instant if self.instant > after else None

    def last(self, until: Millis) -> Millis | None:
        return self.instant if self.instant <= until else None

    def count(self, after: Millis, until: Millis) -> int:
        return int(after < self.instant <= until)


class Chain:
    """A schedule that names no slots beforehand: whether it is due is asked about the run before, at the time.

    Each run is claimed as the successor of the one before: its slot is the millisecond after that one was claimed,
    which the store tells every beat alike. So there is at most one run for each, whatever the beats' objects and clocks
    say; but nothing to look ahead to, and nothing to catch up.
    """

    key = "chain"
    """One for all: the row of runs goes on when the definition is edited."""
    reason = ""
    """Why it is one, for people."""

    def ask(self, last_run: Millis) -> tuple[bool, Millis | None]:
        """Whether it is due now, *last_run* being the run before, and after how long to ask again; None: not soon."""
        raise NotImplementedError

    def next(self, after: Millis) -> Millis | None:
        return None

    def last(self, until: Millis) -> Millis | None:
        return None

    def count(self, after: Millis, until: Millis) -> int:
        return 0


def at_instant(when: datetime, zone: ZoneInfo) -> Millis:
    """The instant that *when* means, in milliseconds, rounded up so that it is never before what was written.

    An aware datetime is its own instant. A naive one is the first instant at which the clock of *zone* shows that time
    or later: after a gap if the clock skips it, the first pass if it shows it twice; its ``fold`` is not looked at.

    :raises ConfigurationError: beyond the years 1 to 9999 in UTC.
    """
    if when.utcoffset() is not None:
        instant = -((_UTC_EPOCH - when) // timedelta(milliseconds=1))
    else:
        whole, fraction = divmod(when.replace(tzinfo=None) - _EPOCH, timedelta(seconds=1))
        clock = wall_clock(zone)
        second = clock.first_instant(whole)
        shown = second + clock.span_at(second)[2]
        # In a gap the slot is the gap's end itself, whatever fraction was written.
        instant = second * 1000 + (-(-fraction // timedelta(milliseconds=1)) if shown == whole else 0)
    if not _FIRST_INSTANT <= instant <= _LAST_INSTANT:
        raise ConfigurationError(f"{when} in {zone.key} lies beyond the years 1 to 9999 in UTC")
    return instant
