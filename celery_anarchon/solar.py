"""Solar events as slots: sunrise, noon, sunset, and the dawns and dusks.

Belongs here: :class:`Solar`, and the only calls to ephem. Does not belong here: Celery's class
(:mod:`celery_anarchon.schedules`).

ephem iterates towards an event, and where it ends depends by some milliseconds on where it began: two beats that asked
at two moments would name two slots. So there is one search for each fixed window of 24 h at a place, always begun at
the window's start, and an event counts only inside its window. Windows are counted in local mean time, which is UTC and
four minutes for each degree east, and begin where every event of their kind is hours away: none is lost, and none
counts twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from math import floor
from typing import Any

from celery_anarchon.errors import ConfigurationError
from celery_anarchon.model import Millis
from celery_anarchon.zones import DAY, FIRST, LAST

_INSTALL = 'pip install "celery-anarchon[solar]"'
_HOUR = 3600
_EPOCH = 25_567.5
"""1970-01-01T00:00Z as ephem counts days."""

_RISING, _TRANSIT, _SETTING = "next_rising", "next_transit", "next_setting"
_WINDOW_STARTS = {_RISING: -6 * _HOUR, _TRANSIT: 0, _SETTING: 6 * _HOUR}
"""In local mean time, from its midnight: 18:00 of the day before, 00:00, 06:00."""

# As Celery 5.7 has them: the disc's upper edge with usual refraction, or its centre so many degrees below the horizon.
# Not read from there: beats may run on several releases of Celery, and older ones have a wrong dusk_astronomical.
_EVENTS = {
    "dawn_astronomical": (_RISING, "-18", True),
    "dawn_nautical": (_RISING, "-12", True),
    "dawn_civil": (_RISING, "-6", True),
    "sunrise": (_RISING, "-0:34", False),
    "solar_noon": (_TRANSIT, "0", False),
    "sunset": (_SETTING, "-0:34", False),
    "dusk_civil": (_SETTING, "-6", True),
    "dusk_nautical": (_SETTING, "-12", True),
    "dusk_astronomical": (_SETTING, "-18", True),
}

_REACH = 800
"""How many windows without the event are looked through before it is said not to come. Up to a latitude of 89.5 degrees
no wait is longer than 290 days, at 89.9 the longest is two years, and at the poles ephem finds transits only."""

_SAMPLE = (("48.8566", "2.3522"), ("69.6492", "18.9553"))
"""Paris and Tromsø: where the sun grazes the horizon a small difference shows."""


class Solar:
    """Slots of a solar event at a place (a :class:`celery_anarchon.timetable.Timetable`), floored to the second.

    On a day without the event (midnight sun, polar night, white nights) there is no slot.
    """

    __slots__ = ("_first", "event", "key", "lat", "lon")

    def __init__(self, event: str, lat: float, lon: float) -> None:
        """
        :raises ConfigurationError: no such event or place, or ephem is not installed.
        """
        if event not in _EVENTS:
            raise ConfigurationError(f"solar event {event!r} is not known; known: {', '.join(sorted(_EVENTS))}")
        self.event = event
        self.lat = _degrees("latitude", lat, 90)
        self.lon = _degrees("longitude", lon, 180)
        # Not ephem's version: with it every upgrade would make a new job, that owes nothing of the time before.
        self.key = f"solar {event} {self.lat} {self.lon}"
        self._first = _WINDOW_STARTS[_EVENTS[event][0]] - floor(Decimal(self.lon) * 240)
        _ephem()

    def __repr__(self) -> str:
        return f"<{self.key}>"

    def next(self, after: Millis) -> Millis | None:
        instant = max(after // 1000, FIRST)
        day = self._day(instant)
        for slot in self._events(range(day, day + _REACH)):
            if slot > instant:
                return slot * 1000
        return None

    def last(self, until: Millis) -> Millis | None:
        instant = min(until // 1000, LAST)
        day = self._day(instant)
        for slot in self._events(range(day, day - _REACH, -1)):
            if slot <= instant:
                return slot * 1000
        return None

    def count(self, after: Millis, until: Millis) -> int:
        start, end = max(after // 1000, FIRST), min(until // 1000, LAST)
        if end <= start:
            return 0
        return sum(start < slot <= end for slot in self._events(range(self._day(start), self._day(end) + 1)))

    def in_window_of(self, instant: int) -> int | None:
        """The second of the event in the window that *instant* lies in."""
        return next(self._events([self._day(instant)]), None)

    def _day(self, instant: int) -> int:
        """The window that *instant* lies in."""
        return (instant - self._first) // DAY

    def _events(self, days: Iterable[int]) -> Iterator[int]:
        for day in days:
            start = self._first + day * DAY
            if FIRST <= start <= LAST - DAY:
                slot = _event(self.event, self.lat, self.lon, start)
                if slot is not None:
                    yield slot


def sample(start: int) -> list[int | None]:
    """Events of every kind in the 400 days from *start*: what beats compare to see whether they compute alike.

    Not ephem's version: releases mostly agree to the last bit.

    :raises ConfigurationError: ephem is not installed.
    """
    places = [Solar(event, float(lat), float(lon)) for lat, lon in _SAMPLE for event in _EVENTS]
    return [place.in_window_of(start + days * DAY) for place in places for days in range(0, 400, 40)]


@lru_cache(maxsize=16_384)
def _event(event: str, lat: str, lon: str, start: int) -> int | None:
    """The second of the event in the 24 h from *start*; None when it does not come."""
    ephem = _ephem()
    search, horizon, center = _EVENTS[event]
    # A new one for each search: it holds the search's state, and a schedule is shared between threads.
    observer = ephem.Observer()
    observer.lat, observer.lon, observer.elevation, observer.pressure = lat, lon, 0, 0
    observer.horizon = horizon
    options = {"use_center": True} if center else {}
    try:
        found = getattr(observer, search)(ephem.Sun(), start=ephem.Date(start / DAY + _EPOCH), **options)
    except ephem.CircumpolarError:
        return None
    second = floor((float(found) - _EPOCH) * DAY)
    return second if start <= second < start + DAY else None


def _ephem() -> Any:
    try:
        import ephem
    except ImportError:
        raise ConfigurationError(f"solar schedules need ephem, which is not installed: {_INSTALL}") from None
    # Before 4.2 a search at a high latitude could run for ever, and the beat with it.
    if tuple(int(part) for part in ephem.__version__.split(".")[:2]) < (4, 2):
        raise ConfigurationError(f"solar schedules need ephem 4.2 or later, not {ephem.__version__}: {_INSTALL}")
    return ephem


def _degrees(what: str, value: Any, most: int) -> str:
    """*value* as canonical text, which ephem reads: ``48.50`` and ``48.5`` are one place."""
    try:
        exact = Decimal(str(value))
    except InvalidOperation:
        exact = Decimal("NaN")
    if isinstance(value, (str, bool)) or not exact.is_finite() or abs(exact) > most:
        raise ConfigurationError(f"{what} must be a number of degrees from {-most} to {most}, not {value!r}")
    text = f"{exact:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text
