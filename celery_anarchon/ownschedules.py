"""Schedules of our own for Celery: :class:`every`, :class:`cron` and :class:`at`, valid in any ``beat_schedule``. They
keep their slots under stock beat too.

Does not belong here: other people's classes (:mod:`celery_anarchon.schedules`), and what a slot is
(:mod:`celery_anarchon.timetable`).
"""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any, Literal
from zoneinfo import ZoneInfo

from celery import schedules as stock

from celery_anarchon import wire
from celery_anarchon.appzones import app_zone, named, named_zone
from celery_anarchon.durations import parse_duration
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.model import Millis
from celery_anarchon.timetable import At, Interval, Timetable, at_instant, cron_from_text

NEVER = 100 * 366 * 86_400.0
"""Seconds that stock beat is told to wait when there is no next slot: a number, because it computes with it, and so
long that the entry never comes to the top of beat's heap."""

_MS = timedelta(milliseconds=1)
_FIXED_UTC = timezone.utc
_EPOCH = datetime(1970, 1, 1, tzinfo=_FIXED_UTC)
_UTC = ZoneInfo("UTC")


class _TimetableSchedule(stock.BaseSchedule):  # type: ignore[misc]
    """A schedule whose answers under stock beat come from its timetable."""

    def timetable(self) -> Timetable:
        """As stock beat sees it: the zone, where one is needed, is the app's."""
        raise NotImplementedError

    def is_due(self, last_run_at: datetime) -> tuple[bool, float]:
        """``(due, seconds)``: due once the first slot after *last_run_at* has come; then look again after *seconds*."""
        timetable = self.timetable()
        now = _millis(self.now())
        slot = timetable.next(_millis(last_run_at))
        due = slot is not None and slot <= now
        coming = timetable.next(now) if due else slot
        answer: tuple[bool, float] = stock.schedstate(due, NEVER if coming is None else (coming - now) / 1000)
        return answer

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        """Time from now to the first slot after *last_run_at*: below zero if overdue, very long if there is none."""
        slot = self.timetable().next(_millis(last_run_at))
        return timedelta(seconds=NEVER) if slot is None else (slot - _millis(self.now())) * _MS

    def _definition(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        if type(other) is type(self):
            return self._definition() == other._definition()
        return NotImplemented

    def __getstate__(self) -> dict[str, Any]:
        # The app and what was read from it stay behind, as with stock schedules: beat sets its own on what it loads.
        return {name: value for name, value in self.__dict__.items() if name not in ("_app", "tz", "utc_enabled")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _app=None)


class every(_TimetableSchedule):
    """Every *interval*, on a grid from 1970-01-01T00:00Z that is the same on all hosts and after every restart.

    :param interval: seconds, a timedelta, or text such as ``"90s"``, ``"30m"``, ``"1h30m"``, ``"1d"``; at least 0.1 s.
    :param offset: a duration that shifts the grid, or ``"auto"``: by a hash of the job's name, to spread jobs. Stock
        beat tells a schedule no name, so there ``"auto"`` shifts nothing.
    :raises ConfigurationError: no such interval or offset.
    """

    def __init__(
        self, interval: float | timedelta | str, *, offset: float | timedelta | str | Literal["auto"] = 0
    ) -> None:
        self.every_ms = parse_duration(interval, "every(): interval", negative=True)
        self.offset: Millis | Literal["auto"]
        self.offset = "auto" if offset == "auto" else parse_duration(offset, "every(): offset", negative=True)
        with named("every()"):
            Interval(self.every_ms)
        super().__init__()

    def timetable(self) -> Interval:
        return Interval(self.every_ms, 0 if self.offset == "auto" else self.offset)

    def _definition(self) -> tuple[Any, ...]:
        return self.every_ms, self.offset

    def __repr__(self) -> str:
        offset = "" if self.offset == 0 else f", offset={_seconds(self.offset)!r}"
        return f"every({_seconds(self.every_ms)!r}{offset})"


class cron(_TimetableSchedule):
    """Cron text, by crontab(5)'s day rule; see :func:`celery_anarchon.timetable.cron_from_text`.

    :param text: five fields, or an alias such as ``@daily``.
    :param timezone: name of the zone (or a tzinfo with a name) that the text is meant in; None: the app's.
    :param seconds: allow a 6th field, seconds, and a 7th, year.
    :raises ConfigurationError: the text or the zone is wrong.
    """

    def __init__(self, text: str, *, timezone: str | tzinfo | None = None, seconds: bool = False) -> None:
        with named("cron()"):
            self.zone = None if timezone is None else named_zone(timezone)
            self._fields = cron_from_text(text, self.zone or _UTC, seconds=seconds).fields.text
        self.text = text
        self.seconds = bool(seconds)
        super().__init__()

    def timetable(self) -> Timetable:
        return cron_from_text(self.text, self.zone or app_zone(self.app), seconds=self.seconds)

    def _definition(self) -> tuple[Any, ...]:
        return self._fields, None if self.zone is None else self.zone.key

    def __repr__(self) -> str:
        zone = "" if self.zone is None else f", timezone={self.zone.key!r}"
        return f"cron({self.text!r}{zone}{', seconds=True' if self.seconds else ''})"


class at(_TimetableSchedule):
    """Once. An aware datetime is its instant; a naive one is meant in the app's zone: right after a gap that skips it,
    in the first pass of an hour that is repeated.

    :param when: a datetime, or its ISO text.
    :raises ConfigurationError: no datetime.
    """

    def __init__(self, when: datetime | str) -> None:
        if isinstance(when, str):
            with contextlib.suppress(ValueError):
                when = wire.read_datetime(when)
        if not isinstance(when, datetime):
            raise ConfigurationError(f"at(): write a datetime or its ISO text, such as 2026-03-29T02:30, not {when!r}")
        self.when = when
        super().__init__()

    def timetable(self) -> At:
        return self.timetable_in(_UTC if self._aware else app_zone(self.app))

    def timetable_in(self, zone: ZoneInfo) -> At:
        """With a naive datetime meant in *zone*."""
        return At(at_instant(self.when, zone))

    @property
    def _aware(self) -> bool:
        return self.when.utcoffset() is not None

    def _definition(self) -> tuple[Any, ...]:
        return self._aware, _millis(self.when) if self._aware else self.when

    def __repr__(self) -> str:
        return f"at({self.when.isoformat()!r})"


# --- small helpers ----------------------------------------------------------------------------------------------------


def _millis(moment: datetime) -> Millis:
    """Floored; Celery takes a naive datetime as UTC."""
    if moment.utcoffset() is None:
        moment = moment.replace(tzinfo=_FIXED_UTC)
    return (moment - _EPOCH) // _MS


def _seconds(duration: Millis | str) -> float | str:
    if isinstance(duration, str):
        return duration
    return duration // 1000 if duration % 1000 == 0 else duration / 1000
