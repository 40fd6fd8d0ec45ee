"""A crontab in a zone: the slots of its fields, by the two rules that hold where clocks are changed.

Belongs here: :class:`Cron`, and the ways to make one. Does not belong here: calendar arithmetic
(:mod:`celery_anarchon.cronfields`), offsets (:mod:`celery_anarchon.zones`), text (:mod:`celery_anarchon.crontext`).

1. *Every-hour job*, the hour field allows all 24 hours: a slot at every instant whose wall clock matches. Both passes
   of a repeated hour count, and nothing is moved into or out of a gap.
2. *Timed job*, any other: each matching local time T has one slot, the first instant at which the clock shows T or
   later. Times that land on one instant are one slot.

"The first instant that shows T" grows with T, so a timed job needs no search through instants: the slots after a are
those of the T later than everything the clock has shown up to a.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from zoneinfo import ZoneInfo

from celery_anarchon.cronfields import HOURS, MINUTES, MONTH_DAYS, MONTHS, WEEKDAYS, CronFields, DayRule
from celery_anarchon.crontext import fields_of_text
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.model import Millis
from celery_anarchon.zones import DAY, FIRST, LAST, wall_clock, zone_of

_REACH = 2 * DAY
"""No two offsets are further apart than this, so no local time is shown again after it."""


class Cron:
    """Slots of crontab fields in a zone (a :class:`celery_anarchon.timetable.Timetable`)."""

    __slots__ = ("_clock", "_coming", "fields", "key", "zone")

    def __init__(self, fields: CronFields, zone: ZoneInfo) -> None:
        if zone.key is None:
            raise ConfigurationError("a timezone without a name is not the same on every host; use a named ZoneInfo")
        self.fields = fields
        self.zone = zone
        self.key = f"cron {fields.text} {zone.key}"
        self._clock = wall_clock(zone)
        self._coming: tuple[Millis, Millis] = (0, 0)
        """An instant that was asked about and the slot after it. Replaced as one, so that threads may share it."""

    def __repr__(self) -> str:
        return f"<{self.key}>"

    def next(self, after: Millis) -> Millis | None:
        asked, coming = self._coming
        if asked <= after < coming:
            # No slot lies between the two. Many jobs share this object, and ask about nearly the same instant.
            return coming
        found = self._next(after)
        if found is not None:
            self._coming = after, found
        return found

    def _next(self, after: Millis) -> Millis | None:
        instant = max(after // 1000, FIRST)
        slot = self._real_after(instant) if self.fields.every_hour else self._timed_after(instant)
        return None if slot is None or slot > LAST else slot * 1000

    def last(self, until: Millis) -> Millis | None:
        instant = min(until // 1000, LAST)
        slot = self._real_until(instant) if self.fields.every_hour else self._timed_until(instant)
        return None if slot is None or slot <= FIRST else slot * 1000

    def count(self, after: Millis, until: Millis) -> int:
        start, end = max(after // 1000, FIRST), min(until // 1000, LAST)
        if end <= start:
            return 0
        return self._count_real(start, end) if self.fields.every_hour else self._count_timed(start, end)

    # Rule 2: timed jobs.

    def _timed_after(self, instant: int) -> int | None:
        local = self.fields.after(self._clock.latest_shown(instant))
        return None if local is None else self._clock.first_instant(local)

    def _timed_until(self, instant: int) -> int | None:
        local = self.fields.until(self._clock.latest_shown(instant))
        return None if local is None else self._clock.first_instant(local)

    def _count_timed(self, start: int, end: int) -> int:
        clock = self._clock
        total = self.fields.count(clock.latest_shown(start), clock.latest_shown(end))
        change = clock.span_at(start)[1]
        while change <= end:
            before, after = clock.latest_shown(change - 1), clock.latest_shown(change)
            if after > before + 1:
                # All times of a gap land on its end.
                total -= max(self.fields.count(before, after) - 1, 0)
            change = clock.span_at(change)[1]
        return total

    # Rule 1: every-hour jobs, stretch by stretch of constant offset.

    def _real_after(self, instant: int) -> int | None:
        at = instant + 1
        give_up = LAST
        while at <= give_up:
            _, end, offset = self._clock.span_at(at)
            local = self.fields.after(at - 1 + offset)
            if local is None:
                # No later year matches; a clock that is set back soon could still show an earlier one again.
                give_up = min(give_up, instant + _REACH)
                at = end
            elif local - offset < end:
                return local - offset
            elif end - at >= _REACH:
                # Nothing matches before `local`, and what was shown before `at` is not shown again.
                at = max(end, local - offset - _REACH)
            else:
                at = end
        return None

    def _real_until(self, instant: int) -> int | None:
        at = instant
        give_up = FIRST
        while at >= give_up:
            start, _, offset = self._clock.span_at(at)
            local = self.fields.until(at + offset)
            if local is None:
                give_up = max(give_up, instant - _REACH)
                at = start - 1
            elif local - offset >= start:
                return local - offset
            elif at - start >= _REACH:
                at = min(start - 1, local - offset + _REACH)
            else:
                at = start - 1
        return None

    def _count_real(self, start: int, end: int) -> int:
        total, at = 0, start + 1
        while at <= end:
            _, stop, offset = self._clock.span_at(at)
            last = min(stop - 1, end)
            total += self.fields.count(at - 1 + offset, last + offset)
            at = last + 1
        return total


@lru_cache(maxsize=4096)
def _shared(fields: CronFields, zone: ZoneInfo) -> Cron:
    return Cron(fields, zone)


def cron_from_text(text: str, zone: ZoneInfo | str, *, seconds: bool = False) -> Cron:
    """The timetable of cron text, by crontab(5)'s day rule. Equal definitions share one object.

    :param seconds: allow a 6th field, seconds, and a 7th, year (croniter's order).
    :raises ConfigurationError: the text is wrong, ambiguous between cron tools, or never due.
    """
    return _shared(fields_of_text(text, seconds=seconds), zone_of(zone) if isinstance(zone, str) else zone)


def cron_from_fields(
    minute: Collection[int],
    hour: Collection[int],
    day_of_month: Collection[int],
    month_of_year: Collection[int],
    day_of_week: Collection[int],
    zone: ZoneInfo | str,
) -> Cron:
    """The timetable of Celery's expanded sets (Sunday is 0): day of month AND day of week. Equal definitions share one
    object.

    :raises ConfigurationError: a set is empty, holds anything but whole numbers of its range, or no date matches.
    """
    fields = _fields(
        _checked("minute", minute, MINUTES),
        _checked("hour", hour, HOURS),
        _checked("day_of_month", day_of_month, MONTH_DAYS),
        _checked("month_of_year", month_of_year, MONTHS),
        _checked("day_of_week", day_of_week, WEEKDAYS),
    )
    return _shared(fields, zone_of(zone) if isinstance(zone, str) else zone)


@lru_cache(maxsize=4096)
def _fields(
    minute: frozenset[int],
    hour: frozenset[int],
    day_of_month: frozenset[int],
    month_of_year: frozenset[int],
    day_of_week: frozenset[int],
) -> CronFields:
    days = DayRule(month_days=day_of_month, weekdays=day_of_week)
    return CronFields(minutes=minute, hours=hour, months=month_of_year, days=days)


def _checked(name: str, values: Collection[int], allowed: frozenset[int]) -> frozenset[int]:
    if values and allowed.issuperset(values) and set(map(type, values)) == {int}:
        return frozenset(values)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
            raise ConfigurationError(
                f"{name} holds {value!r}; it takes whole numbers from {min(allowed)} to {max(allowed)}"
            )
    if not values:
        raise ConfigurationError(f"{name} is empty, so nothing would ever be due; give at least one number")
    return frozenset(values)
