"""Reading cron text.

Belongs here: croniter, which parses and validates, and what is refused because cron tools disagree on it or because it
is not the same everywhere. Nothing here runs again once the fields are expanded. Does not belong here: slots
(:mod:`celery_anarchon.crontable`).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from croniter import croniter

from celery_anarchon.cronfields import (
    HOURS,
    LAST_WEEK,
    MINUTES,
    MONTH_DAYS,
    MONTHS,
    SECONDS,
    WEEKDAYS,
    CronFields,
    DayRule,
)
from celery_anarchon.errors import ConfigurationError

_NAMES = ("minute", "hour", "day of month", "month", "day of week", "second", "year")
_RANGES = ("0-59", "0-23", "1-31", "1-12", "0-7 (0 and 7 are Sunday)", "0-59", "1970-2099")
_DATE, _MONTH, _WEEKDAY, _SECOND, _YEAR = 2, 3, 4, 5, 6

_ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_MONTH_NAMES = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAY_NAMES = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_NUMBERS = {
    _MONTH: {name: number for number, name in enumerate(_MONTH_NAMES, 1)},
    _WEEKDAY: {name: number for number, name in enumerate(_WEEKDAY_NAMES)},
}

# Blanks as cron knows them: a no-break space is not one.
_FIELD = re.compile(r"\S+", re.ASCII)
_HASHED = re.compile(r"[hr](\(.*\))?(/.*)?", re.ASCII)
_RANGE = re.compile(r"(\w+)-(\w+)", re.ASCII)
_NEAREST_WORKDAY = re.compile(r"(\d+)w|w(\d+)", re.ASCII)


def fields_of_text(text: str, *, seconds: bool = False) -> CronFields:
    """The fields of cron text: five, or an alias such as ``@daily``; with *seconds* also six or seven, in croniter's
    order (seconds last but one, year last).

    Understands what croniter does (names, steps, wrapping ranges, ``L``, ``L5``, ``1#2``, ``15W``, ``?``). Day of month
    and day of week are joined as crontab(5) tells: by AND if either starts with ``*``, else by OR.

    :raises ConfigurationError: wrong, never due, different on every host, or ambiguous between cron tools. One line.
    """
    if not isinstance(text, str):
        raise ConfigurationError(f'cron text is text such as "0 3 * * *", not {text!r}')
    return _read(text, bool(seconds))


@lru_cache(maxsize=4096)
def _read(text: str, seconds: bool) -> CronFields:
    what = f"cron text {text!r}"
    parts = _FIELD.findall(_without_alias(text.strip().lower(), what))
    if len(parts) not in (5, 6, 7):
        raise ConfigurationError(
            f"{what} has {len(parts)} fields; write five: minute, hour, day of month, month, day of week"
        )
    if len(parts) > 5 and not seconds:
        raise ConfigurationError(
            f"{what} has {len(parts)} fields; write five, or pass seconds=True to have the sixth read as seconds "
            "(and a seventh as the year)"
        )
    for index, part in enumerate(parts):
        _refuse_unclear(index, part, what)
    expanded, numbered = _expand(parts, what)
    days = _day_rule(parts, expanded, numbered, what)
    try:
        return CronFields(
            minutes=_numbers(expanded[0], MINUTES),
            hours=_numbers(expanded[1], HOURS),
            months=_numbers(expanded[_MONTH], MONTHS),
            days=days,
            seconds=_numbers(expanded[_SECOND], SECONDS) if len(parts) > _SECOND else frozenset({0}),
            years=_years(expanded),
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"{what}: {error}") from None


def _without_alias(text: str, what: str) -> str:
    if not text.startswith("@"):
        return text
    if text in _ALIASES:
        return _ALIASES[text]
    if text == "@reboot":
        raise ConfigurationError(f"{what}: a start is not a slot that many beats could share; write a time")
    if text.startswith("@every"):
        raise ConfigurationError(f'{what}: an interval is no cron text; use every("5m")')
    raise ConfigurationError(f"{what} is not known; aliases are {', '.join(_ALIASES)}")


def _refuse_unclear(index: int, part: str, what: str) -> None:
    name = _NAMES[index]
    if _HASHED.fullmatch(part):
        raise ConfigurationError(
            f"{what}: {name} {part.upper()!r} is drawn by each program for itself (R) or needs a name to hash (H); "
            "write the number"
        )
    for item in part.split(","):
        ends = _RANGE.fullmatch(item.partition("/")[0].partition("#")[0])
        if ends and _same(index, ends[1], ends[2]):
            raise ConfigurationError(
                f"{what}: {name} {item!r} is all values to some cron tools and one value to others; write '*' or "
                f"{ends[1]!r}"
            )


def _same(index: int, low: str, high: str) -> bool:
    names = _NUMBERS.get(index, {})
    try:
        first, last = (names[end] if end in names else int(end) for end in (low, high))
    except ValueError:
        return False
    if index == _WEEKDAY and (first, last) != (0, 7):
        # 0-7 is the whole week to everybody; 7-0 and sun-sun are not.
        first, last = first % 7, last % 7
    return first == last


def _expand(parts: list[str], what: str) -> tuple[list[list[Any]], dict[int, set[Any]]]:
    parsed = _parsed(parts)
    if not isinstance(parsed, Exception):
        return parsed
    for index, part in enumerate(parts):
        alone = ["*"] * len(parts)
        alone[index] = part
        if isinstance(_parsed(alone), Exception):
            raise ConfigurationError(
                f"{what}: {_NAMES[index]} {part!r} is not valid; it takes {_RANGES[index]}"
            ) from parsed
    raise ConfigurationError(f"{what} is not valid: {parsed}") from parsed


def _parsed(parts: list[str]) -> tuple[list[list[Any]], dict[int, set[Any]]] | Exception:
    try:
        expanded, numbered = croniter.expand(" ".join(parts))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        # croniter's own errors are ValueErrors; the others are how it stumbles over junk.
        return error
    return list(expanded), dict(numbered)


def _numbers(values: list[Any], every: frozenset[int]) -> frozenset[int]:
    return every if "*" in values else frozenset(value for value in values if value != "l")


def _years(expanded: list[list[Any]]) -> frozenset[int] | None:
    if len(expanded) <= _YEAR or "*" in expanded[_YEAR]:
        return None
    return frozenset(expanded[_YEAR])


def _day_rule(parts: list[str], expanded: list[list[Any]], numbered: dict[int, set[Any]], what: str) -> DayRule:
    date, weekday = parts[_DATE], parts[_WEEKDAY]
    if numbered and any("#" not in item and not item.startswith("l") for item in weekday.split(",")):
        raise ConfigurationError(f"{what}: day of week {weekday!r} mixes numbered and plain days; write two jobs")
    nearest = _NEAREST_WORKDAY.fullmatch(date)
    # crontab(5): the two are joined by OR only if both are restricted and neither starts with a star.
    restricted = expanded[_DATE][0] != "*" and expanded[_WEEKDAY][0] != "*"
    either = restricted and not date.startswith("*") and not weekday.startswith("*")
    if either and (nearest or numbered):
        raise ConfigurationError(
            f"{what}: day of month {date!r} and day of week {weekday!r} together: cron tools disagree when one of them "
            "has '#', 'W' or the last weekday; write two jobs"
        )
    return DayRule(
        month_days=frozenset() if nearest else _numbers(expanded[_DATE], MONTH_DAYS),
        last_day="l" in expanded[_DATE] and "*" not in expanded[_DATE],
        nearest_workdays=frozenset({int(nearest[1] or nearest[2])}) if nearest else frozenset(),
        weekdays=frozenset() if numbered else _numbers(expanded[_WEEKDAY], WEEKDAYS),
        numbered_weekdays=frozenset(
            (int(day), LAST_WEEK if place == "l" else int(place))
            for day, places in numbered.items()
            for place in places
        ),
        either=either,
    )
