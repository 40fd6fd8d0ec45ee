"""The fields of a crontab as sets, and the local times that they match.

Belongs here: calendar arithmetic on local times without a zone: the next, the latest, how many. Does not belong here:
reading cron text (:mod:`celery_anarchon.crontext`), and zones (:mod:`celery_anarchon.crontable`).

A local time is whole seconds since 1970-01-01T00:00 on the wall clock. Sunday is 0.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from calendar import monthrange
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import date
from functools import lru_cache

from celery_anarchon.errors import ConfigurationError
from celery_anarchon.zones import DAY

SECONDS = MINUTES = frozenset(range(60))
HOURS = frozenset(range(24))
MONTH_DAYS = frozenset(range(1, 32))
MONTHS = frozenset(range(1, 13))
WEEKDAYS = frozenset(range(7))

LAST_WEEK = -1
"""The place of a weekday's last occurrence in a month, where others are 1 to 5."""

_EPOCH = date(1970, 1, 1).toordinal()
_FIRST_YEAR, _LAST_YEAR = 2, 9998


@dataclass(frozen=True, kw_only=True)
class DayRule:
    """Which days of a month match. The three kinds of month days are joined by OR, as are the two of weekdays."""

    month_days: frozenset[int] = MONTH_DAYS
    last_day: bool = False
    """The last day of the month (``L``)."""
    nearest_workdays: frozenset[int] = frozenset()
    """The workday nearest to the n-th, inside its month (``15W``)."""
    weekdays: frozenset[int] = WEEKDAYS
    numbered_weekdays: frozenset[tuple[int, int]] = frozenset()
    """(weekday, place in the month): the second Monday is (1, 2), the last Friday (5, LAST_WEEK)."""
    either: bool = False
    """Month days OR weekdays (cron text with both restricted), not AND (Celery)."""

    def matching(self, first_weekday: int, length: int) -> tuple[int, ...]:
        """The matching days of a month of *length* days that starts on *first_weekday*, ascending."""
        return tuple(day for day in range(1, length + 1) if self._matches(day, first_weekday, length))

    def _matches(self, day: int, first_weekday: int, length: int) -> bool:
        weekday = (first_weekday + day - 1) % 7
        by_date = (
            day in self.month_days
            or (self.last_day and day == length)
            or any(day == _nearest_workday(wanted, first_weekday, length) for wanted in self.nearest_workdays)
        )
        by_weekday = (
            weekday in self.weekdays
            or (weekday, (day + 6) // 7) in self.numbered_weekdays
            or (day + 7 > length and (weekday, LAST_WEEK) in self.numbered_weekdays)
        )
        return by_date or by_weekday if self.either else by_date and by_weekday

    def canonical(self) -> DayRule:
        """The same rule, spelled in one way: every OR that holds for all days is an AND of full sets."""
        all_days, all_weekdays = self.month_days == MONTH_DAYS, self.weekdays == WEEKDAYS
        return DayRule() if self.either and (all_days or all_weekdays) else self

    @property
    def texts(self) -> tuple[str, str]:
        """The month days and the weekdays as canonical text."""
        dates = [_text(self.month_days, MONTH_DAYS)] if self.month_days else []
        dates += ["L"] if self.last_day else []
        dates += [f"{day}W" for day in sorted(self.nearest_workdays)]
        weekdays = [_text(self.weekdays, WEEKDAYS)] if self.weekdays else []
        weekdays += [f"{day}#{'L' if place == LAST_WEEK else place}" for day, place in sorted(self.numbered_weekdays)]
        return ",".join(dates), ",".join(weekdays)


def _nearest_workday(day: int, first_weekday: int, length: int) -> int:
    day = min(day, length)
    weekday = (first_weekday + day - 1) % 7
    if weekday == 6:
        return day - 1 if day > 1 else day + 2
    if weekday == 0:
        return day + 1 if day < length else day - 2
    return day


class CronFields:
    """Expanded fields of a crontab. Immutable, and safe to share between threads."""

    __slots__ = ("_days", "_hour_list", "_hours", "_month_list", "_seconds", "_years", "days", "every_hour", "text")

    def __init__(
        self,
        *,
        minutes: frozenset[int],
        hours: frozenset[int],
        months: frozenset[int],
        days: DayRule,
        seconds: frozenset[int] = frozenset({0}),
        years: frozenset[int] | None = None,
    ) -> None:
        """All sets are expanded and in range; *years* None means all.

        :raises ConfigurationError: no date matches, such as 31 February.
        """
        self.days = days.canonical()
        self.every_hour = hours == HOURS
        """Rule 1 of the slot rules applies, not rule 2."""
        self._hours = hours
        self._hour_list = tuple(sorted(hours))
        self._seconds = _seconds_of_an_hour(minutes, seconds)
        self._month_list = tuple(sorted(months))
        self._years = None if years is None else tuple(sorted(years))
        self._days: dict[tuple[int, int], tuple[int, ...]] = {}
        dates, weekdays = self.days.texts
        self.text = " ".join(
            (
                _text(minutes, MINUTES),
                _text(hours, HOURS),
                dates,
                _text(months, MONTHS),
                weekdays,
                _text(seconds, SECONDS),
                "*" if years is None else _text(years),
                "or" if self.days.either else "and",
            )
        )
        """Canonical: equal texts match the same local times."""
        self._refuse_impossible(dates, months, weekdays)

    def __eq__(self, other: object) -> bool:
        return self.text == other.text if isinstance(other, CronFields) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)

    def after(self, local: int) -> int | None:
        """The first matching local time later than *local*; None when there is none."""
        day, second = divmod(local, DAY)
        found = self._day_from(day)
        if found is None:
            return None
        if found > day:
            return found * DAY + self._hour_list[0] * 3600 + self._seconds[0]
        hour, rest = divmod(second, 3600)
        if hour in self._hours and rest < self._seconds[-1]:
            return found * DAY + hour * 3600 + self._seconds[bisect_right(self._seconds, rest)]
        index = bisect_right(self._hour_list, hour)
        if index < len(self._hour_list):
            return found * DAY + self._hour_list[index] * 3600 + self._seconds[0]
        found = self._day_from(day + 1)
        return None if found is None else found * DAY + self._hour_list[0] * 3600 + self._seconds[0]

    def until(self, local: int) -> int | None:
        """The latest matching local time at or before *local*; None when there is none."""
        day, second = divmod(local, DAY)
        found = self._day_until(day)
        if found is None:
            return None
        if found < day:
            return found * DAY + self._hour_list[-1] * 3600 + self._seconds[-1]
        hour, rest = divmod(second, 3600)
        if hour in self._hours and rest >= self._seconds[0]:
            return found * DAY + hour * 3600 + self._seconds[bisect_right(self._seconds, rest) - 1]
        index = bisect_left(self._hour_list, hour)
        if index > 0:
            return found * DAY + self._hour_list[index - 1] * 3600 + self._seconds[-1]
        found = self._day_until(day - 1)
        return None if found is None else found * DAY + self._hour_list[-1] * 3600 + self._seconds[-1]

    def count(self, after: int, until: int) -> int:
        """How many matching local times lie in (*after*, *until*]. One step per month, whatever the fields."""
        if until <= after:
            return 0
        (first, start), (last, end) = divmod(after, DAY), divmod(until, DAY)
        days = self._count_days(first, last)
        total = days * len(self._hour_list) * len(self._seconds)
        if self._day_from(first) == first:
            total -= self._count_in_day(start)
        if self._day_from(last) == last:
            total -= len(self._hour_list) * len(self._seconds) - self._count_in_day(end)
        return total

    def _count_in_day(self, second: int) -> int:
        """Matching times from midnight to *second* of a matching day, both included."""
        hour, rest = divmod(second, 3600)
        whole = bisect_left(self._hour_list, hour) * len(self._seconds)
        return whole + bisect_right(self._seconds, rest) if hour in self._hours else whole

    # Days are counted from 1970-01-01, as local times are.

    def _month(self, year: int, month: int) -> tuple[int, ...]:
        """The matching days of a month that its field allows."""
        first_weekday = date(year, month, 1).toordinal() % 7
        length = monthrange(year, month)[1]
        days = self._days.get((first_weekday, length))
        if days is None:
            days = self._days[first_weekday, length] = self.days.matching(first_weekday, length)
        return days

    def _has(self, year: int, month: int) -> bool:
        return month in self._month_list and (self._years is None or year in self._years)

    def _day_from(self, day: int) -> int | None:
        """The first matching day at or after *day*."""
        if day < _FIRST_DAY:
            day = _FIRST_DAY
        elif day > _LAST_DAY:
            return None
        here = date.fromordinal(day + _EPOCH)
        year, month = here.year, here.month
        if self._has(year, month):
            days = self._month(year, month)
            index = bisect_left(days, here.day)
            if index < len(days):
                return day + days[index] - here.day
        for later_year, later_month in self._months_after(year, month):
            days = self._month(later_year, later_month)
            if days:
                return date(later_year, later_month, days[0]).toordinal() - _EPOCH
        return None

    def _day_until(self, day: int) -> int | None:
        """The latest matching day at or before *day*."""
        if day > _LAST_DAY:
            day = _LAST_DAY
        elif day < _FIRST_DAY:
            return None
        here = date.fromordinal(day + _EPOCH)
        year, month = here.year, here.month
        if self._has(year, month):
            days = self._month(year, month)
            index = bisect_right(days, here.day)
            if index > 0:
                return day + days[index - 1] - here.day
        for earlier_year, earlier_month in self._months_before(year, month):
            days = self._month(earlier_year, earlier_month)
            if days:
                return date(earlier_year, earlier_month, days[-1]).toordinal() - _EPOCH
        return None

    def _months_after(self, year: int, month: int) -> Iterator[tuple[int, int]]:
        if self._years is None or year in self._years:
            for later in self._month_list[bisect_right(self._month_list, month) :]:
                yield year, later
        if self._years is None:
            years: Collection[int] = range(year + 1, _LAST_YEAR + 1)
        else:
            years = self._years[bisect_right(self._years, year) :]
        for later_year in years:
            for later in self._month_list:
                yield later_year, later

    def _months_before(self, year: int, month: int) -> Iterator[tuple[int, int]]:
        if self._years is None or year in self._years:
            for earlier in self._month_list[: bisect_left(self._month_list, month)][::-1]:
                yield year, earlier
        if self._years is None:
            years: Collection[int] = range(year - 1, _FIRST_YEAR - 1, -1)
        else:
            years = self._years[: bisect_left(self._years, year)][::-1]
        for earlier_year in years:
            for earlier in self._month_list[::-1]:
                yield earlier_year, earlier

    def _count_days(self, first: int, last: int) -> int:
        """How many matching days lie in [*first*, *last*]."""
        first, last = max(first, _FIRST_DAY), min(last, _LAST_DAY)
        if first > last:
            return 0
        start, end = date.fromordinal(first + _EPOCH), date.fromordinal(last + _EPOCH)
        total = 0
        if self._has(start.year, start.month):
            days = self._month(start.year, start.month)
            total += len(days) - bisect_left(days, start.day)
        for year, month in self._months_after(start.year, start.month):
            if (year, month) > (end.year, end.month):
                break
            total += len(self._month(year, month))
        if self._has(end.year, end.month):
            days = self._month(end.year, end.month)
            total -= len(days) - bisect_right(days, end.day)
        return total

    def _refuse_impossible(self, dates: str, months: frozenset[int], weekdays: str) -> None:
        # The calendar repeats after 400 years, so what does not occur in 2000 to 2399 never does.
        years = range(2000, 2400) if self._years is None else self._years
        if any(self._month(year, month) for year in years for month in self._month_list):
            return
        raise ConfigurationError(
            f"no date ever matches: day of month {dates}, month {_text(months, MONTHS)}, day of week {weekdays}"
            + ("" if self._years is None else f", year {_text(frozenset(self._years))}")
            + "; correct the day or the month"
        )


_FIRST_DAY = date(_FIRST_YEAR, 1, 1).toordinal() - _EPOCH
_LAST_DAY = date(_LAST_YEAR, 12, 31).toordinal() - _EPOCH


@lru_cache(maxsize=256)
def _seconds_of_an_hour(minutes: frozenset[int], seconds: frozenset[int]) -> tuple[int, ...]:
    return tuple(sorted(minute * 60 + second for minute in minutes for second in seconds))


def _text(values: frozenset[int], every: frozenset[int] | None = None) -> str:
    """``*`` for the whole field, else numbers and ranges."""
    if values == every:
        return "*"
    parts: list[str] = []
    ordered = sorted(values)
    while ordered:
        length = 1
        while length < len(ordered) and ordered[length] == ordered[0] + length:
            length += 1
        parts.append(str(ordered[0]) if length == 1 else f"{ordered[0]}-{ordered[length - 1]}")
        ordered = ordered[length:]
    return ",".join(parts)
