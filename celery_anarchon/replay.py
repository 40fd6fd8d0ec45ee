"""Schedule classes that say themselves when they are due, as timetables.

Belongs here: the virtual beat (:class:`Replay`), the questions that tell whether one may be trusted
(:func:`why_not`), and the last resort where not (:class:`Successor`). Does not belong here: which class is which
(:mod:`celery_anarchon.schedules`), and how a beat claims a successor (:mod:`celery_anarchon.chains`).

A beat knows such a class by two calls only: ``is_due(last_run_at)``, and the clock that the object asks for "now". So
the object is copied, given a clock that stands still, and asked; the clock is moved on by what it answered, until it is
due. That instant is the slot, whoever works it out, if three things hold: the same question has one answer, the answer
does not come from another clock than the frozen one, and it does not depend on where the asking began.
"""

from __future__ import annotations

import gc
import hashlib
import math
import random
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, tzinfo
from datetime import time as time_of_day
from pathlib import PurePath
from types import FrameType
from typing import Any
from zoneinfo import ZoneInfo

from celery_anarchon.model import Millis
from celery_anarchon.timetable import Chain
from celery_anarchon.wire import moment, parse_time, time_text
from celery_anarchon.zones import LAST

LOOKS = 20_000
"""How many times a class may answer "not yet" before its next slot: two weeks of looking once a minute."""

PROBE_LOOKS = 3 * LOOKS
"""How many looks the whole test may take. Looks, not seconds: every host must come to the same end."""

COUNTED = 10_000
"""More slots than this are not counted: each of them is a replay."""

_KEPT = 1_024
_AGAIN: Millis = 1_000
"""What to wait for an object that says to look again at once."""
_CENTURY: Millis = 100 * 366 * 86_400_000
_HOUR: Millis = 3_600_000
_FARTHEST: Millis = LAST * 1000
_WINDOWS = tuple(_HOUR * 4**power for power in range(10))
"""How far before an instant the latest slot is looked for: one hour at first, thirty years at last."""

# A week-day, a week-end, a night on which Europe's clocks change, and the end of a year: the same for every beat.
_STARTS = tuple(
    parse_time(text)
    for text in ("2026-06-10T10:17:31.250Z", "2026-09-12T20:40:09Z", "2026-10-24T22:05:00Z", "2026-12-30T23:59:59.999Z")
)
_LINKS = 3
"""How many slots in a row are looked at from each start."""


class _Caught(Exception):
    """The object looked at something else than the clock that it was given."""


class TooManyLooks(Exception):
    """The object was asked again and again, and was never due."""


# --- the virtual beat -------------------------------------------------------------------------------------------------


@dataclass
class _Patience:
    """How many more times an object is asked."""

    left: int = LOOKS
    caught: list[str] = field(default_factory=list)
    """What it was caught at, in words."""

    def look(self) -> None:
        if self.caught:
            raise _Caught(self.caught[0])
        self.left -= 1
        if self.left < 0:
            raise TooManyLooks(f"it was not due in {LOOKS} looks")


class _Asked:
    """A copy of a schedule object under a clock that stands still, about one last run."""

    def __init__(self, schedule: Any, zone: tzinfo, last_run: Millis, patience: _Patience) -> None:
        # Neither copy nor pickle: __reduce__ of such classes loses what they are made of, or fails.
        self._object = object.__new__(type(schedule))
        self._object.__dict__.update({name: _shallow(value) for name, value in vars(schedule).items()})
        self._object.nowfun = self._now
        self._zone = zone
        self._last_run = _aware(last_run, zone)
        self._at = last_run
        self._patience = patience

    def _now(self) -> datetime:
        return _aware(self._at, self._zone)

    def look(self, at: Millis) -> tuple[bool, Millis | None]:
        self._patience.look()
        self._at = at
        return read_answer(self._object.is_due(self._last_run))


def first_due(schedule: Any, zone: tzinfo, after: Millis, patience: _Patience) -> Millis | None:
    """The instant at which *schedule*, having last run at *after*, becomes due: later than *after*; None: never again.

    To the millisecond, even if the object itself would only be looked at once a minute.
    """
    asked = _Asked(schedule, zone, after, patience)
    at = after
    due, pause = asked.look(at)
    # Due at once: that is the run at `after` itself.
    while pause is not None:
        was_due, before, at = due, at, at + pause
        if at > min(_FARTHEST, after + _CENTURY):
            return None
        due, pause = asked.look(at)
        if due:
            return at if was_due else _turn(asked, before, at)
    return None


def _turn(asked: _Asked, low: Millis, high: Millis) -> Millis:
    """Where the object turns from not due at *low* to due at *high*."""
    if high - low > 1 and not asked.look(high - 1)[0]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if asked.look(middle)[0] else (middle, high)
    return high


def read_answer(answer: Any) -> tuple[bool, Millis | None]:
    """``(due, seconds)`` of an ``is_due``, in milliseconds; None: there is nothing more to wait for.

    :raises TypeError: it is none.
    """
    try:
        due, hint = answer
        if hint is None or hint == math.inf:
            return bool(due), None
        # Whole microseconds first: 60.000000001 s is the float's doing, and means 60 s.
        pause = -(-round(hint * 1_000_000) // 1000)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"is_due answered {answer!r}; it takes (due, seconds until the next look)") from None
    return bool(due), pause if pause > 0 else _AGAIN


class Replay:
    """The slots of a schedule object (a :class:`celery_anarchon.timetable.Timetable`), each found from the one before.

    The first instant that it is asked about begins the row. A beat asks first about the last slot that the store knows,
    so all beats are in one row.
    """

    def __init__(self, schedule: Any, zone: ZoneInfo, asked_in: tzinfo | None = None) -> None:
        """
        :param zone: whose clock changes the slots hang on, for the comparison of zone data.
        :param asked_in: the zone of the times that the object is handed; None: *zone*.
        """
        self.zone = zone
        self.key = key_of(schedule, zone)
        self._schedule = schedule
        self._asked_in = asked_in or zone
        self._lock = threading.Lock()
        self._row: list[Millis] = []

    def __repr__(self) -> str:
        return f"<{self.key}>"

    def next(self, after: Millis) -> Millis | None:
        """:raises TooManyLooks: the object is looked at too often to be due at all."""
        with self._lock:
            if not self._row:
                self._row = [after]
            if after < self._row[0]:
                return self._first_due(after)
            return self._in_row(after)

    def last(self, until: Millis) -> Millis | None:
        with self._lock:
            if self._row and until >= self._row[0]:
                self._in_row(until)
                before = bisect_right(self._row, until) - 1
                # What the row began with need not have been a slot.
                if before > 0:
                    return self._row[before]
        for window in _WINDOWS:
            slot = self._first_due(until - window)
            if slot is not None and slot <= until:
                while (following := self._first_due(slot)) is not None and following <= until:
                    slot = following
                return slot
        return None

    def count(self, after: Millis, until: Millis) -> int:
        """To ten thousand at most."""
        total = 0
        while total < COUNTED and (slot := self.next(after)) is not None and slot <= until:
            total, after = total + 1, slot
        return total

    def _in_row(self, after: Millis) -> Millis | None:
        """The first slot of the row later than *after*, which is not before the row."""
        place = bisect_right(self._row, after)
        if place < len(self._row):
            return self._row[place]
        for _ in range(_KEPT):
            slot = self._first_due(self._row[-1])
            if slot is None:
                return None
            self._row.append(slot)
            if len(self._row) > 2 * _KEPT:
                del self._row[:_KEPT]
            if slot > after:
                return slot
        # Far ahead, as on a command line: a row begins there, and joins this one, as the test has shown.
        self._row = [after]
        slot = self._first_due(after)
        if slot is not None:
            self._row.append(slot)
        return slot

    def _first_due(self, after: Millis) -> Millis | None:
        return first_due(self._schedule, self._asked_in, after, _Patience())


class Successor(Chain):
    """A schedule object that cannot be replayed: asked at the real time, about the last run that the store knows."""

    def __init__(self, schedule: Any, zone: tzinfo, reason: str) -> None:
        self.reason = reason
        self._schedule = schedule
        self._zone = zone

    def ask(self, last_run: Millis) -> tuple[bool, Millis | None]:
        return read_answer(self._schedule.is_due(_aware(last_run, self._zone)))


# --- whether a replay can be trusted ----------------------------------------------------------------------------------


def why_not(schedule: Any, zone: tzinfo) -> str | None:
    """Why the slots of *schedule* cannot be found by replay, or None: they can. Every beat comes to the same answer,
    because all ask the same things about the same instants."""
    patience = _Patience(PROBE_LOOKS)
    seen = False
    at = _STARTS[0]
    try:
        for at in _STARTS:
            with _watched(patience.caught):
                slot = first_due(schedule, zone, at, patience)
                patience.look()
            for link in range(_LINKS):
                if link:
                    slot = first_due(schedule, zone, at, patience)
                trouble = _trouble(schedule, zone, at, slot, patience)
                if trouble:
                    return trouble
                if slot is None:
                    break
                seen, at = True, slot
    except _Caught as caught:
        return str(caught)
    except TooManyLooks:
        return None if seen else "it was not due within the looks that a test may take"
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return f"asked about {time_text(at)} it failed ({words})"
    return None if seen else "it was due at no time that it was asked about"


def _trouble(schedule: Any, zone: tzinfo, start: Millis, slot: Millis | None, patience: _Patience) -> str | None:
    if first_due(schedule, zone, start, patience) != slot:
        return "it answers the same question in two ways"
    if slot is None:
        return None
    for between in {start + (slot - start) // 3, start + (slot - start) * 2 // 3, slot - 1} - {start}:
        if first_due(schedule, zone, between, patience) != slot:
            return "when it is due depends on when it last ran"
    return None


_READERS_OF_TIME = frozenset({"time", "time_ns", "localtime"})
_READERS_OF_DATES = frozenset({"now", "utcnow", "today"})


@contextmanager
def _watched(found: list[str]) -> Iterator[None]:
    """Adds to *found* what reads a real clock, or chance, meanwhile and in this thread, in words."""

    def watch(frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call":
            return
        what = _reads(getattr(function, "__self__", None), getattr(function, "__name__", ""))
        # A log record has the time on it, and means nothing by it.
        if what and not str(frame.f_globals.get("__name__")).startswith("logging"):
            caller: FrameType | None = frame
            while caller is not None and caller.f_globals.get("__name__") == "random":
                caller = caller.f_back
            place = caller or frame
            found.append(f"it {what} ({PurePath(place.f_code.co_filename).name}, line {place.f_lineno})")

    before, collects = sys.getprofile(), gc.isenabled()
    # What a collection calls back has nothing to do with the object, and may look at a clock.
    gc.disable()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()


_CHANCE = getattr(random.random, "__self__", None)


def _reads(owner: Any, name: str) -> str | None:
    if isinstance(owner, type):
        return f"calls {owner.__name__}.{name}()" if issubclass(owner, date) and name in _READERS_OF_DATES else None
    if owner is time:
        return f"calls time.{name}()" if name in _READERS_OF_TIME else None
    if owner is _CHANCE or name == "urandom":
        return "takes random numbers"
    return None


# --- small things -----------------------------------------------------------------------------------------------------


def key_of(schedule: Any, zone: ZoneInfo) -> str:
    """Canonical text of what a schedule object is made of: the same in every process, another when it is edited."""
    cls = type(schedule)
    own = {
        name: value
        for name, value in vars(schedule).items()
        if name not in _NOT_MEANT and not name.startswith(_SPELLING)
    }
    digest = hashlib.sha256(_text(own, 6).encode()).hexdigest()[:16]
    return f"custom {cls.__module__}.{cls.__qualname__} {digest} {zone.key}"


_NOT_MEANT = frozenset({"_app", "app", "nowfun", "tz", "utc_enabled"})
_SPELLING = "_orig_"
"""How a crontab's fields were written; beside it stands what they mean."""
_PLAIN = (type(None), bool, int, float, str, bytes, date, time_of_day, timedelta)


def _text(value: Any, depth: int) -> str:  # noqa: PLR0911 - one return per kind of value
    if isinstance(value, datetime) and value.tzinfo is not None:
        return f"{value.replace(tzinfo=None).isoformat()} {value.utcoffset()}"
    if type(value) in _PLAIN or isinstance(value, (date, datetime)):
        return repr(value)
    if isinstance(value, tzinfo):
        return str(getattr(value, "key", value))
    if isinstance(value, type) or callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if depth == 0:
        return type(value).__qualname__
    if isinstance(value, Mapping):
        return str(sorted((_text(key, depth - 1), _text(item, depth - 1)) for key, item in value.items()))
    if isinstance(value, (set, frozenset)):
        return str(sorted(_text(item, depth - 1) for item in value))
    if isinstance(value, (list, tuple)):
        return str([_text(item, depth - 1) for item in value])
    # Of an object of some library what is private may change by use.
    public = {name: item for name, item in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    return f"{type(value).__module__}.{type(value).__qualname__}{_text(public, depth - 1)}"


def _shallow(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict, set) else value


def _aware(instant: Millis, zone: tzinfo) -> datetime:
    return moment(instant).astimezone(zone)
