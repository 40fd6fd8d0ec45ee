"""Reading durations that people write: numbers, timedeltas and text such as ``"1h30m"``.

Belongs here: one value in, whole milliseconds out, or one sentence that says what was wrong. Does not belong here:
which durations make sense for which option (:mod:`celery_anarchon.options`), and dates.
"""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal
from typing import Any

from celery_anarchon.errors import OptionError
from celery_anarchon.model import Millis

_UNITS = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|[smhdw])\s*", re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)


def parse_duration(value: Any, what: str, *, negative: bool = False) -> Millis:
    """*value* in whole milliseconds.

    A number counts seconds; a timedelta is itself; text is numbers with units, the largest unit first: ``"500ms"``,
    ``"90s"``, ``"30m"``, ``"1h30m"``, ``"1d"``, ``"1w"``, or a bare number of seconds. Zero is allowed.

    :param what: how the value is called in an error, such as ``"job 'export': option 'jitter'"``.
    :param negative: allow a duration below zero.
    :raises OptionError: not a duration, below zero, or not a whole number of milliseconds.
    """
    exact = _milliseconds(value)
    if exact is None:
        raise OptionError(
            f'{what} must be a duration: a number of seconds, a timedelta, or text such as "500ms", "90s", "30m", '
            f'"1h30m" or "1d", not {value!r}'
        )
    if exact != int(exact):
        raise OptionError(f"{what} must be a whole number of milliseconds, not {value!r}; round it")
    if exact < 0 and not negative:
        raise OptionError(f"{what} must not be below zero, and is {value!r}")
    return int(exact)


def _milliseconds(value: Any) -> Decimal | None:
    """Exact, because 0.29 * 1000 in floats is not 290; None when *value* is no duration."""
    if isinstance(value, timedelta):
        return Decimal(value // timedelta(microseconds=1)) / 1000
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float, Decimal)):
        number = Decimal(str(value))
        return number * 1000 if number.is_finite() else None
    if isinstance(value, str):
        return _text(value.strip())
    return None


def _text(text: str) -> Decimal | None:
    sign = -1 if text.startswith("-") else 1
    text = text[1:].lstrip() if sign < 0 else text
    if _NUMBER.fullmatch(text):
        return sign * Decimal(text) * 1000
    total, position, unit_before = Decimal(0), 0, 0
    while position < len(text):
        part = _PART.match(text, position)
        if part is None:
            return None
        unit = _UNITS[part[2]]
        if unit_before and unit >= unit_before:
            return None
        total, position, unit_before = total + Decimal(part[1]) * unit, part.end(), unit
    return sign * total if unit_before else None
