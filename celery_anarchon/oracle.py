"""Expected slots, found the slow way, so that a verdict does not rest on the code that it judges.

Belongs here: the two rules read literally, on a scan of UTC through :mod:`zoneinfo`. Does not belong here: anything
that shares code with :mod:`celery_anarchon.timetable`, or anything fast.

Instants are whole milliseconds since 1970-01-01T00:00Z. A day of minutes takes a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from typing import TypeAlias
from zoneinfo import ZoneInfo

Fields: TypeAlias = Mapping[str, Collection[int]]
"""Expanded sets under ``minute hour day_of_month month_of_year day_of_week`` (Sunday is 0) and, if seconds count,
``second``."""

_EPOCH = datetime(1970, 1, 1)
_SECOND, _MINUTE = timedelta(seconds=1), timedelta(minutes=1)
_WARM_UP = timedelta(days=2)
"""Longer than any clock was ever set back, so what it showed before that does not matter."""


def expected_interval(every_ms: int, offset_ms: int, after: int, until: int) -> list[int]:
    """The instants offset + k * every in (*after*, *until*]."""
    first = -((offset_ms - after - 1) // every_ms)
    return list(range(offset_ms + first * every_ms, until + 1, every_ms))


def expected_cron(fields: Fields, zone: str, after: int, until: int, *, either: bool = False) -> list[int]:
    """The slots in (*after*, *until*] of crontab *fields* in the zone called *zone*.

    Rule 1, all 24 hours allowed: every instant whose wall clock matches. Rule 2, otherwise: for each matching local
    time T the first instant at which the wall clock shows T or later.

    :param either: day of month OR day of week, not AND.
    """
    start, end = _EPOCH + timedelta(milliseconds=after), _EPOCH + timedelta(milliseconds=until)
    scan = _real if set(fields["hour"]) == set(range(24)) else _timed
    found = scan(fields, ZoneInfo(zone), start, end, either)
    return [(instant - _EPOCH) // timedelta(milliseconds=1) for instant in found if start < instant <= end]


def _real(fields: Fields, zone: ZoneInfo, start: datetime, end: datetime, either: bool) -> Iterator[datetime]:
    for instant, local in _ticks(fields, zone, start, start, end):
        if _matches(fields, local, either):
            yield instant


def _timed(fields: Fields, zone: ZoneInfo, start: datetime, end: datetime, either: bool) -> Iterator[datetime]:
    step = _SECOND if "second" in fields else _MINUTE
    shown: datetime | None = None
    for instant, local in _ticks(fields, zone, start - _WARM_UP, start, end):
        if shown is not None and instant > start and local > shown:
            # Every T that the clock shows or passes for the first time at this instant.
            time = shown.replace(second=0) if step is _MINUTE else shown
            while time < local:
                time += step
                if shown < time <= local and _matches(fields, time, either):
                    yield instant
                    break
        shown = local if shown is None else max(shown, local)


def _ticks(
    fields: Fields, zone: ZoneInfo, early: datetime, start: datetime, end: datetime
) -> Iterator[tuple[datetime, datetime]]:
    """Instants (naive UTC) from *early* on with their wall clock: each second that can matter. Whole minutes are enough
    while the clock runs evenly and shows whole minutes, and before *start*."""
    minute = early.replace(second=0, microsecond=0)
    start = start.replace(second=0, microsecond=0)
    here = _local(minute, zone)
    while minute <= end:
        there = _local(minute + _MINUTE, zone)
        yield minute, here
        if there - here != _MINUTE or (minute >= start and ("second" in fields or here.second)):
            for number in range(1, 60):
                instant = minute + number * _SECOND
                yield instant, _local(instant, zone)
        minute, here = minute + _MINUTE, there


def _local(instant: datetime, zone: ZoneInfo) -> datetime:
    return instant.replace(tzinfo=timezone.utc).astimezone(zone).replace(tzinfo=None, fold=0)


def _matches(fields: Fields, local: datetime, either: bool) -> bool:
    by_date = local.day in fields["day_of_month"]
    by_weekday = local.isoweekday() % 7 in fields["day_of_week"]
    return (
        local.second in fields.get("second", (0,))
        and local.minute in fields["minute"]
        and local.hour in fields["hour"]
        and local.month in fields["month_of_year"]
        and (by_date or by_weekday if either else by_date and by_weekday)
    )
