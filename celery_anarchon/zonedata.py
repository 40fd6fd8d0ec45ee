"""Whether all hosts compute slots from the same data: fingerprints of it, and the choice of where it comes from.

Belongs here: what beats compare about the data that slots are read from, and :func:`packaged`. Does not belong here:
what a zone says (:mod:`celery_anarchon.zones`), and who compares when.

Two releases of the time zone database put some slots of the same crontab on two instants, and every beat would send its
own. The version of the files does not tell: systems patch theirs, or do not write it down. So what counts is compared:
the clock changes of the zones in use, over the next 400 days.
"""

from __future__ import annotations

import hashlib
import json
import zoneinfo
from collections.abc import Collection, Iterable, Mapping
from importlib import import_module

from celery_anarchon import solar
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.model import Millis
from celery_anarchon.zones import DAY, changes, wall_clock, zone_of

SPAN = 400 * DAY
"""How far ahead clock changes are compared."""

EPHEM = "ephem"
"""Stands among the zones for what solar slots are computed with."""


def zones_of(timetables: Iterable[object]) -> set[str]:
    """The names of the zones that *timetables* read: those of their ``zone``, and :data:`EPHEM` for a solar one."""
    names = set()
    for timetable in timetables:
        zone = getattr(timetable, "zone", None)
        if isinstance(zone, zoneinfo.ZoneInfo):
            names.add(zone.key)
        elif isinstance(timetable, solar.Solar):
            names.add(EPHEM)
    return names


def fingerprints(zones: Iterable[str], at: Millis) -> dict[str, str]:
    """For each of *zones*, eight hex digits that stand for its clock changes in the 400 days from *at*, from the
    beginning of its UTC day: the same for all beats that ask on one day, and on all hosts with equal data.

    :raises ConfigurationError: a name that is no zone here.
    """
    start = at // 1000 // DAY * DAY
    return {name: _digest(_facts(name, start)) for name in sorted(zones)}


def as_text(prints: Mapping[str, str], at: Millis) -> str:
    """What a beat shows to the others: the day that *prints* begin on, and each of them."""
    return " ".join([str(at // 1000 // DAY), *(f"{name}={prints[name]}" for name in sorted(prints))])


def differing(mine: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """The names that stand in both and mean different data. A zone that only one of them uses is no disagreement."""
    return sorted(name for name in mine.keys() & others.keys() if mine[name] != others[name])


def disagreements(mine: str, others: str) -> list[str]:
    """The zones that two beats both use and whose data differs, by what :func:`as_text` made of them.

    Nothing is known, and so nothing differs, when they are of two days (around midnight), or one shows nothing: the
    next heartbeat tells.
    """
    (my_day, my_prints), (other_day, other_prints) = _read(mine), _read(others)
    return differing(my_prints, other_prints) if my_day == other_day else []


def packaged() -> str:
    """From now on read zones from the ``tzdata`` package only, whatever the system has; the release it holds.

    It holds for the whole process, and for zones asked for later by name: so call it before the first of them. Zone
    objects that exist already keep the data they were made from.

    :raises ConfigurationError: the package is not installed.
    """
    try:
        release = str(import_module("tzdata").IANA_VERSION)
    except ImportError:
        raise ConfigurationError("setting 'anarchon_packaged_tzdata' needs the package: pip install tzdata") from None
    if zoneinfo.TZPATH:
        zoneinfo.reset_tzpath(to=())
        zoneinfo.ZoneInfo.clear_cache()
    return release


def _facts(name: str, start: int) -> Collection[object]:
    if name == EPHEM:
        return solar.sample(start)
    zone = zone_of(name)
    later = [(change.at, change.after) for change in changes(zone, start, start + SPAN)]
    return [wall_clock(zone).span_at(start - 1)[2], *later]


def _digest(facts: Collection[object]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]


def _read(text: str) -> tuple[str, dict[str, str]]:
    day, *pairs = text.split(" ")
    return day, {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
