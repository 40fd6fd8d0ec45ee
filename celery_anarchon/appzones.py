"""The zones that Celery's apps and schedule objects name, as zones that every host knows by the same name.

Belongs here: what reads a tzinfo of any library, and the refusal of "whatever this host has". Does not belong here:
what a zone says (:mod:`celery_anarchon.zones`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

from celery.schedules import BaseSchedule
from celery.utils.time import LocalTimezone

from celery_anarchon.errors import ConfigurationError, OptionError
from celery_anarchon.timetable import zone_of

_FIXED_UTC = timezone.utc
_UTC = ZoneInfo("UTC")


def app_zone(app: Any) -> ZoneInfo:
    """The zone of the app's ``timezone``, UTC if that is not set.

    :raises ConfigurationError: it is whatever the host's zone is.
    """
    zone = app.conf.timezone
    if zone:
        with named("setting 'timezone'"):
            return named_zone(zone)
    if app.conf.enable_utc:
        return _UTC
    raise ConfigurationError(
        "enable_utc=False without a timezone means the zone of whatever host beat runs on; set timezone to a name such "
        'as "Europe/Paris"'
    )


def own_zone(schedule: Any, app: Any) -> ZoneInfo | None:
    """The zone that a crontab names itself; None when it follows the app."""
    if "tz" not in vars(schedule) and type(schedule).tz is BaseSchedule.tz:
        return None
    zone = schedule.tz
    # Celery keeps the app's zone in the schedule once it was asked for: that is still the app's.
    return None if zone is None or zone is app.timezone else named_zone(zone)


def named_zone(zone: str | tzinfo) -> ZoneInfo:
    """*zone* by its name in the time zone database, whatever library made it.

    :raises ConfigurationError: it has no name there, or is the host's.
    """
    if isinstance(zone, str):
        return zone_of(zone)
    if zone is _FIXED_UTC:
        return _UTC
    name = getattr(zone, "key", None) or getattr(zone, "zone", None) or _dateutil_name(zone)
    if isinstance(zone, LocalTimezone) or name in ("local", "/etc/localtime"):
        raise ConfigurationError(
            f'timezone {zone!r} is the zone of whatever host this runs on; set a name such as "Europe/Paris"'
        )
    if not isinstance(name, str):
        raise ConfigurationError(f'timezone {zone!r} has no name that every host knows; use one such as "Europe/Paris"')
    return zone_of(name)


def _dateutil_name(zone: tzinfo) -> str | None:
    if not type(zone).__module__.startswith("dateutil."):
        return None
    if type(zone).__name__ == "tzutc":
        return "UTC"
    if type(zone).__name__ == "tzlocal":
        return "local"
    file = getattr(zone, "_filename", None)
    return file.rpartition("zoneinfo/")[2] if isinstance(file, str) else None


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Says what an error is about. The exact classes only: their constructors are known."""
    try:
        yield
    except OptionError as error:
        raise OptionError(f"{what}: {error}") from error.__cause__
    except ConfigurationError as error:
        raise ConfigurationError(f"{what}: {error}") from error.__cause__
