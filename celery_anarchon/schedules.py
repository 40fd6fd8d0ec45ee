"""Celery's schedules as timetables.

Belongs here: :func:`timetable_of`, what it refuses and why; :func:`register_timetable`. Does not belong here: schedules
of our own (:mod:`celery_anarchon.ownschedules`), what a slot is (:mod:`celery_anarchon.timetable`), and how a class is
replayed (:mod:`celery_anarchon.replay`).
"""

from __future__ import annotations

import binascii
import logging
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, Literal
from zoneinfo import ZoneInfo

from celery import Celery
from celery import schedules as stock

from celery_anarchon.appzones import app_zone, named, named_zone, own_zone
from celery_anarchon.durations import parse_duration
from celery_anarchon.errors import ConfigurationError, OptionError
from celery_anarchon.model import Millis
from celery_anarchon.options import Kind
from celery_anarchon.ownschedules import at, cron, every
from celery_anarchon.replay import Replay, Successor, key_of, why_not
from celery_anarchon.rruletable import RRule, is_fixed
from celery_anarchon.solar import Solar
from celery_anarchon.timetable import (
    At,
    Chain,
    Interval,
    Timetable,
    at_instant,
    cron_from_fields,
    cron_from_text,
    zone_of,
)

__all__ = ["kind_of", "register_timetable", "timetable_of"]

logger = logging.getLogger("celery_anarchon.beat")

_UTC = ZoneInfo("UTC")
_EVERY_MINUTE, _EVERY_HOUR, _EVERY_DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)

_DUE = frozenset({"is_due", "remaining_estimate", "remaining_delta", "_delta_to_next"})
_ZONED_CRONTABS = frozenset({("django_celery_beat.tzcrontab", "TzAwareCrontab")})
"""Crontab classes whose ``is_due`` differs from stock in the zone only."""
_CLOCKED = ("django_celery_beat.clockedschedule", "clocked")
"""Due once, and then for ever: its scheduler disables it."""
_RRULE = ("redbeat.schedules", "rrule")

_registered: dict[type, Callable[[Any], Timetable]] = {}


_KINDS = (
    (every, Kind.INTERVAL),
    (cron, Kind.CRON),
    (at, Kind.AT),
    (stock.crontab, Kind.CRON),
    (stock.schedule, Kind.INTERVAL),
)


# --- timetables -------------------------------------------------------------------------------------------------------


def register_timetable(cls: type, factory: Callable[[Any], Timetable]) -> None:
    """From now on schedules of class *cls* mean the slots of the timetable that *factory* makes of each of them.

    For classes that cannot be replayed, or whose slots are better computed than searched for. It holds for subclasses
    too, unless they override what makes *cls* due. Call it where the class is defined: each beat and command has to.

    :param factory: called with the schedule object, whose ``app`` and ``tz`` are set; its answer has what
        :class:`celery_anarchon.timetable.Timetable` says.
    :raises ConfigurationError: *cls* is no schedule class, or one whose slots have rules here.
    """
    if not (isinstance(cls, type) and issubclass(cls, stock.BaseSchedule)) or cls is stock.BaseSchedule:
        raise ConfigurationError(f"register_timetable(): {cls!r} is no subclass of Celery's BaseSchedule")
    if cls in (*(known for known, _ in _KINDS), stock.solar):
        raise ConfigurationError(
            f"register_timetable(): the slots of {cls.__name__} have rules here; use a subclass of it"
        )
    if not callable(factory):
        raise ConfigurationError(f"register_timetable(): {factory!r} cannot be called with a schedule")
    _registered[cls] = factory


def timetable_by_class(schedule: Any, *, job: str, app: Celery) -> Any:
    """The timetable of a *schedule* whose class says itself when it is due; any other schedule as it is.

    A registered class means what was registered, django-celery-beat's ``clocked`` its one instant. Anything else is
    replayed, or, where that cannot be trusted, chained, and the log says why.

    :raises ConfigurationError: what was registered fails, or the object takes its beginning from its process.
    """
    if not isinstance(schedule, stock.BaseSchedule) or _known_kind(schedule) is not None:
        return schedule
    with named(f"job {job!r}"):
        cls = type(schedule)
        for base in cls.__mro__:
            if base in _registered and not _says_itself_when(cls, base):
                return _checked(_registered[base](schedule), f"the timetable registered for {base.__qualname__}")
        zone = app_zone(app)
        if _derives(cls, _CLOCKED):
            return At(at_instant(schedule.clocked_time, zone))
        if _derives(cls, _RRULE):
            return _rrule(schedule, zone)
        if not hasattr(cls, "is_due") or cls.is_due is stock.BaseSchedule.is_due:
            raise ConfigurationError(f"schedule class {cls.__module__}.{cls.__qualname__} has no is_due")
        reason = why_not(schedule, app.timezone)
        if reason is None:
            return Replay(schedule, own_zone(schedule, app) or zone, app.timezone)
        logger.warning(
            "job %r: the slots of class %s.%s are not known beforehand, because %s; each run is claimed as the "
            "successor of the one before: one message each, and nothing to look ahead to or to catch up "
            "(celery_anarchon.schedules.register_timetable gives it slots)",
            job,
            cls.__module__,
            cls.__qualname__,
            reason,
        )
        return Successor(schedule, app.timezone, reason)


def _derives(cls: type, name: tuple[str, str]) -> bool:
    """Whether *cls* is the class of that module and name, or is due when that is."""
    return any(
        (base.__module__, base.__qualname__) == name and not _says_itself_when(cls, base) for base in cls.__mro__
    )


def _rrule(schedule: Any, app_zone: ZoneInfo) -> RRule:
    begin = schedule.dtstart
    # Without one it takes the present moment, and that is hardly ever a whole second.
    if begin.microsecond:
        raise ConfigurationError(
            f"dtstart of this rrule is {begin}: without one, or with the present moment, each beat would have slots of "
            "its own; write a dtstart in whole seconds"
        )
    zone = None if is_fixed(begin.tzinfo) else named_zone(begin.tzinfo)
    return RRule(schedule.rrule, zone, key_of(schedule, zone or app_zone))


def _checked(timetable: Any, what: str) -> Timetable:
    """Whether it has what the engine asks of a timetable; wrong slots only its author can see."""
    if not isinstance(getattr(timetable, "key", None), str) or not timetable.key:
        raise ConfigurationError(f"{what} has no key, a text that is another one when its slots are others")
    for name in ("next", "last", "count"):
        if not callable(getattr(timetable, name, None)):
            raise ConfigurationError(f"{what} has no {name}(); see celery_anarchon.timetable.Timetable")
    return timetable  # type: ignore[no-any-return]


def kind_of(schedule: Any, *, job: str) -> Kind:
    """What *schedule* is as far as job options care: an interval, a crontab, one instant or a solar event.

    :raises ConfigurationError: a schedule that cannot be run here; the text names *job*.
    """
    with named(f"job {job!r}"):
        return _kind(schedule)


def timetable_of(  # noqa: PLR0911 - one return per kind
    schedule: Any,
    *,
    job: str,
    app: Celery,
    offset: Millis | str | None = None,
    timezone: str | None = None,
    apps_zone: Callable[[], ZoneInfo] | None = None,
) -> Timetable:
    """The timetable of a schedule entry's *schedule*: a number of seconds, a timedelta, Celery's ``schedule``,
    ``crontab`` (with the zone of its ``tz``) or ``solar``, or :class:`every`, :class:`cron`, :class:`at`.

    :param offset: the job option: milliseconds, or ``"auto"`` for crc32 of the job's name modulo the interval.
    :param timezone: the job option: name of the zone of a crontab that does not name its own.
    :param apps_zone: what tells the app's zone, for callers that ask for many jobs; None: the app is asked.
    :raises OptionError: *offset* or *timezone* where they mean nothing, or against what the schedule itself says.
    :raises ConfigurationError: a schedule that cannot mean the same slots on every host, or that never comes.

    Every text names the job, what is wrong, and the fix.
    """
    schedule = timetable_by_class(schedule, job=job, app=app)
    apps_zone = apps_zone or partial(app_zone, app)
    with named(f"job {job!r}"):
        kind = _kind(schedule)
        if offset is not None and kind is not Kind.INTERVAL:
            raise OptionError(f"option 'offset' shifts the grid of an interval, and this job is {_a(kind)}; remove it")
        if timezone is not None and kind is not Kind.CRON:
            raise OptionError(f"option 'timezone' is the zone of a crontab, and this job is {_a(kind)}; remove it")
        if kind in (Kind.CUSTOM, Kind.CHAIN) or isinstance(schedule, At):
            return schedule  # type: ignore[no-any-return]
        if type(schedule) is stock.solar:
            return Solar(schedule.event, schedule.lat, schedule.lon)
        if isinstance(schedule, at):
            return schedule.timetable_in(_UTC if schedule._aware else apps_zone())
        if isinstance(schedule, every):
            return _interval(schedule.every_ms, _one_offset(schedule.offset, offset), job)
        if isinstance(schedule, cron):
            # By name again: the object may be older than a change of where zones are read from.
            own = None if schedule.zone is None else zone_of(schedule.zone.key)
            zone = _one_zone(own, timezone) or apps_zone()
            return cron_from_text(schedule.text, zone, seconds=schedule.seconds)
        if isinstance(schedule, stock.crontab):
            zone = _one_zone(own_zone(schedule, app), timezone) or apps_zone()
            timetable = _cron_of_sets(schedule, zone)
            if type(schedule) is stock.crontab:
                _share_sets(schedule)
            return timetable
        if isinstance(schedule, stock.schedule):
            if kind is Kind.CRON:
                zone = _one_zone(None, timezone) or apps_zone()
                return _cron_of_sets(_relative_crontab(schedule.run_every), zone)
            if schedule.relative:
                logger.warning(
                    "job %r: relative=True means something only for one day, hour or minute; %s is counted from "
                    "1970-01-01T00:00Z instead, on every host alike",
                    job,
                    schedule.run_every,
                )
            return _interval(parse_duration(schedule.run_every, "interval", negative=True), offset, job)
        return _interval(parse_duration(schedule, "interval", negative=True), offset, job)


def _kind(schedule: Any) -> Kind:
    if isinstance(schedule, (bool, str)) or schedule is None:
        raise ConfigurationError(
            f"{schedule!r} is no schedule; write a number of seconds, a timedelta, a crontab(...), or one of "
            'every("30m"), cron("0 3 * * *"), at(datetime)'
        )
    if isinstance(schedule, (int, float, timedelta)):
        return Kind.INTERVAL
    kind = _known_kind(schedule)
    if kind is not None:
        return kind
    if isinstance(schedule, Chain):
        return Kind.CHAIN
    if isinstance(schedule, At):
        return Kind.AT
    if isinstance(schedule, stock.BaseSchedule) or not callable(getattr(schedule, "next", None)):
        raise ConfigurationError(f"{schedule!r} is no schedule")
    return Kind.CUSTOM


def _known_kind(schedule: Any) -> Kind | None:
    """The kind of a schedule object whose slots have rules here."""
    cls: Any = type(schedule)
    kind = _kind_of_class(cls)
    # Intervals of ours are not relative, whatever they say.
    if kind is Kind.INTERVAL and isinstance(schedule, stock.schedule) and schedule.relative:
        return Kind.CRON if _relative_crontab(schedule.run_every) else kind
    return kind


@lru_cache(maxsize=512)
def _kind_of_class(cls: Any) -> Kind | None:
    # The exact class: how it searches is not asked, and a subclass may search otherwise.
    if cls is stock.solar:
        return Kind.SOLAR
    for known, kind in _KINDS:
        if issubclass(cls, known) and not _says_itself_when(cls, known):
            return kind
    return None


def _says_itself_when(cls: type, known: type) -> bool:
    """Whether a subclass overrides what makes *known* due."""
    between = cls.__mro__[: cls.__mro__.index(known)]
    return any(
        _DUE & vars(base).keys() and (base.__module__, base.__qualname__) not in _ZONED_CRONTABS for base in between
    )


def _a(kind: Kind) -> str:
    return {
        Kind.INTERVAL: "an interval",
        Kind.CRON: "a crontab",
        Kind.AT: "due once",
        Kind.SOLAR: "a solar event",
        Kind.CUSTOM: "of a class of its own",
        Kind.CHAIN: "of a class that names no slots beforehand",
    }[kind]


def _interval(every_ms: Millis, offset: Millis | str | None, job: str) -> Interval:
    if offset is None:
        return _grid(every_ms, 0)
    if isinstance(offset, str):
        grid = _grid(every_ms, 0)
        if offset == "auto":
            # Not hash(): that differs from process to process.
            return _grid(every_ms, binascii.crc32(job.encode()) % grid.every)
        offset = parse_duration(offset, "option 'offset'", negative=True)
    return _grid(every_ms, offset)


@lru_cache(maxsize=4096)
def _grid(every_ms: Millis, offset: Millis) -> Interval:
    """Equal definitions share one object."""
    return Interval(every_ms, offset)


def _one_offset(own: Millis | Literal["auto"], option: Millis | str | None) -> Millis | str | None:
    if option is None or option == own:
        return own
    if own == 0:
        return option
    raise OptionError("option 'offset' and the offset of every() differ; keep one of them")


def _one_zone(own: ZoneInfo | None, option: str | None) -> ZoneInfo | None:
    if option is None:
        return own
    try:
        zone = zone_of(option)
    except ConfigurationError as error:
        raise OptionError(f"option 'timezone': {error}") from None
    if own is not None and own.key != zone.key:
        raise OptionError(
            f"option 'timezone' is {zone.key!r} and the schedule itself says {own.key!r}; keep one of them"
        )
    return zone


def _cron_of_sets(schedule: Any, zone: ZoneInfo) -> Timetable:
    return cron_from_fields(
        schedule.minute,
        schedule.hour,
        schedule.day_of_month,
        schedule.month_of_year,
        schedule.day_of_week,
        zone,
    )


_SETS = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")


def _share_sets(schedule: Any) -> None:
    """Each crontab holds five sets of its own, up to 9 kB, and a schedule has few that differ. Celery only reads them,
    so equal ones can be one frozen set."""
    for name in _SETS:
        values = getattr(schedule, name)
        if type(values) is set:
            setattr(schedule, name, _one_set(frozenset(values)))


@lru_cache(maxsize=4096)
def _one_set(values: frozenset[int]) -> frozenset[int]:
    return values


def _relative_crontab(run_every: timedelta) -> Any:
    """Celery rounds a relative interval to local days, hours or minutes: for one of them that is a crontab."""
    if run_every == _EVERY_DAY:
        return stock.crontab(minute=0, hour=0)
    if run_every == _EVERY_HOUR:
        return stock.crontab(minute=0)
    if run_every == _EVERY_MINUTE:
        return stock.crontab()
    return None
