"""Where local time meets UTC: a zone's offsets, and the one rule that turns a local time into an instant.

Belongs here: everything that asks a :class:`~zoneinfo.ZoneInfo`. Does not belong here: what a schedule wants, and zone
objects of other libraries (:mod:`celery_anarchon.appzones`).

Instants are whole seconds since 1970-01-01T00:00Z, and local times are whole seconds since 1970-01-01T00:00 on the wall
clock: integers, so that neither a fold nor a tzinfo can get lost on the way.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import TypeAlias
from zoneinfo import ZoneInfo, available_timezones

from celery_anarchon.errors import ConfigurationError

DAY = 86_400
FIRST = -62_135_424_000
"""0001-01-03T00:00Z: from here on every zone's wall clock has a datetime."""
LAST = 253_402_041_600
"""9999-12-29T00:00Z: the same at the other end."""

Span: TypeAlias = tuple[int, int, int]
"""(start, end, offset): from instant start until before instant end, local time is UTC + offset."""

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_BLOCK = 400 * DAY
_HOST_LOCAL = frozenset({"localtime", "posixrules", "Factory"})


def zone_of(name: str) -> ZoneInfo:
    """The zone called *name* in the IANA time zone database.

    :raises ConfigurationError: no such zone, or a name that means another zone on every host.
    """
    if not isinstance(name, str):
        raise ConfigurationError(f'a timezone is a name such as "Europe/Paris", not {name!r}')
    if name in _HOST_LOCAL or name.startswith(("right/", "posix/")):
        raise ConfigurationError(f'timezone {name!r} is not the same on every host; use a name such as "Europe/Paris"')
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        raise ConfigurationError(f"timezone {name!r} is not known{_nearest(name)}") from None


def _nearest(name: str) -> str:
    known = {zone.lower(): zone for zone in sorted(available_timezones())}
    found = difflib.get_close_matches(name.lower(), known, n=1)
    return f"; did you mean {known[found[0]]!r}?" if found else '; use a name such as "Europe/Paris"'


@dataclass(frozen=True)
class Change:
    """A clock change: from instant `at` on, local time is UTC + `after`; until then it was UTC + `before`."""

    at: int
    before: int
    after: int


def changes(zone: ZoneInfo, start: int, end: int) -> Iterator[Change]:
    """The clock changes of *zone* at instants in [*start*, *end*), ascending."""
    clock = wall_clock(zone)
    _, at, before = clock.span_at(start - 1)
    while at < end:
        _, following, after = clock.span_at(at)
        if after != before:
            yield Change(at, before, after)
        at, before = following, after


@lru_cache(maxsize=1024)
def wall_clock(zone: ZoneInfo) -> WallClock:
    """The shared wall clock of *zone*."""
    return WallClock(zone)


class WallClock:
    """A zone's wall clock as stretches of constant offset, found once per 400 days. Safe to share between threads:
    what a thread adds to the cache is complete and the same whoever computes it."""

    __slots__ = ("_blocks", "zone")

    def __init__(self, zone: ZoneInfo) -> None:
        self.zone = zone
        self._blocks: dict[int, tuple[Span, ...]] = {}

    def span_at(self, instant: int) -> Span:
        """The stretch that *instant* lies in. It may end where the offset goes on, but never spans a change."""
        block = instant // _BLOCK
        spans = self._blocks.get(block)
        if spans is None:
            spans = self._blocks[block] = self._find_spans(block * _BLOCK, (block + 1) * _BLOCK)
        for span in spans:
            if instant < span[1]:
                return span
        raise AssertionError("spans fill their block")  # pragma: no cover

    def latest_shown(self, instant: int) -> int:
        """The latest local time that the clock has shown up to *instant*: max{local(v) : v <= instant}.

        It is local(instant), except after the clock was set back. The first instant that shows T or later is after
        *instant* exactly when T is after this.
        """
        start, _, offset = self.span_at(instant)
        latest = instant + offset
        # Offsets lie within a day of UTC, so nothing before the last two days can have shown more.
        while start > instant - 2 * DAY:
            before = start - 1
            start, _, offset = self.span_at(before)
            latest = max(latest, before + offset)
        return latest

    def first_instant(self, local: int) -> int:
        """min{u : local(u) >= local}: the rule for timed jobs and naive datetimes. In a gap it is the gap's end, in a
        repeated hour the first pass, over a skipped day the start of the next one."""
        instant = local - DAY
        while True:
            _, end, offset = self.span_at(instant)
            found = max(local - offset, instant)
            if found < end:
                return found
            instant = end

    def _find_spans(self, start: int, end: int) -> tuple[Span, ...]:
        # Looking once a day finds every change: no two changes of a zone are less than 95 hours apart in the database.
        spans: list[Span] = []
        offset, seen = self._offset(start), start
        for probe in (*range(start + DAY, end, DAY), end - 1):
            there = self._offset(probe)
            while offset != there:
                low, high = seen, probe
                while high - low > 1:
                    middle = (low + high) // 2
                    low, high = (middle, high) if self._offset(middle) == offset else (low, middle)
                spans.append((start, high, offset))
                start, seen, offset = high, high, self._offset(high)
            seen = probe
        spans.append((start, end, offset))
        return tuple(spans)

    def _offset(self, instant: int) -> int:
        moment = _EPOCH + timedelta(seconds=min(max(instant, FIRST), LAST))
        offset = moment.astimezone(self.zone).utcoffset()
        assert offset is not None
        return offset.days * DAY + offset.seconds
