"""What is alike in many jobs, once: a schedule of 100,000 jobs has few intervals, options and zones that differ.

Belongs here: objects that nobody changes, by their meaning, and what is worked out once for an app. Does not belong
here: what any of it means.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from datetime import datetime, timedelta
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

from celery import Celery
from celery.schedules import maybe_schedule

from celery_anarchon.appzones import app_zone
from celery_anarchon.options import JobOptions

T = TypeVar("T", bound=Hashable)


class Alike:
    """Of one app's jobs. Not for threads."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._zone: ZoneInfo | None = None
        self._schedules: dict[float | timedelta, Any] = {}
        self._options: dict[Hashable, JobOptions] = {}
        self._values: dict[Any, Any] = {}
        self.started: datetime = app.now()
        """When the first of them was made."""

    def zone(self) -> ZoneInfo:
        """The app's zone. Raises what :func:`celery_anarchon.appzones.app_zone` raises."""
        if self._zone is None:
            self._zone = app_zone(self._app)
        return self._zone

    def schedule(self, given: Any, relative: object) -> Any:
        """One schedule object for all entries of the same interval, as Celery would make one for each; anything else as
        it is."""
        if relative or type(given) not in (int, float, timedelta):
            return given
        known = self._schedules.get(given)
        if known is None:
            known = self._schedules[given] = maybe_schedule(given, app=self._app)
        return known

    def options(self, of: Hashable, resolved: Callable[[], JobOptions]) -> JobOptions:
        """What *resolved* made of the first job that is like this one."""
        known = self._options.get(of)
        if known is None:
            known = self._options[of] = resolved()
        return known

    def one(self, value: T) -> T:
        """The first value that equals *value*."""
        return self._values.setdefault(value, value)  # type: ignore[no-any-return]
