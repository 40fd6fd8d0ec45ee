"""The Celery app of the fleet whose schedules say themselves when they are due.

FLEET_CONFIG: see :mod:`beat_app`; ``begin`` among its settings is the instant that some schedules count from.
"""

from __future__ import annotations

import json
import os
import random
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

from celery import Celery
from celery.schedules import BaseSchedule, crontab, schedule
from django_celery_beat.clockedschedule import clocked
from django_celery_beat.tzcrontab import TzAwareCrontab
from redbeat.schedules import rrule

from celery_anarchon.schedules import register_timetable
from celery_anarchon.timetable import Interval

config = json.loads(os.environ["FLEET_CONFIG"])
begin = datetime.fromisoformat(config.pop("begin"))
config.pop("jobs")

app = Celery("fleet", set_as_current=False)
app.conf.update(config)


class HolidayCrontab(crontab):  # type: ignore[misc]
    """Not on holidays."""

    def is_due(self, last_run_at: datetime) -> Any:
        if (self.now().month, self.now().day) == (2, 30):
            return False, 60
        return super().is_due(last_run_at)


class EveryThird(BaseSchedule):  # type: ignore[misc]
    """Whole multiples of three seconds, looked at when it likes."""

    def is_due(self, last_run_at: datetime) -> Any:
        third = int(self.now().timestamp()) // 3 * 3
        return last_run_at.timestamp() < third, 0.7


class Jittered(schedule):  # type: ignore[misc]
    """At random, and thought over each time that it is asked."""

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        return super().remaining_estimate(last_run_at) + timedelta(seconds=random.uniform(0, 1.5))


class WallClock(BaseSchedule):  # type: ignore[misc]
    """Has its own now."""

    def is_due(self, last_run_at: datetime) -> Any:
        left = (last_run_at + timedelta(seconds=2) - datetime.now(timezone.utc)).total_seconds()
        return left <= 0, max(left, 0.5)


class Shifts(BaseSchedule):  # type: ignore[misc]
    """Says nothing; its timetable is registered."""

    def __init__(self, seconds: int) -> None:
        super().__init__()
        self.seconds = seconds


register_timetable(Shifts, lambda shifts: Interval(shifts.seconds * 1_000))

SCHEDULES = {
    "rrule": rrule("SECONDLY", interval=2, dtstart=begin),
    "clocked": clocked(begin + timedelta(seconds=config.pop("clocked_after"))),
    "tz-aware": TzAwareCrontab(tz=ZoneInfo("Asia/Tokyo"), app=app),
    "holidays": HolidayCrontab(),
    "third": EveryThird(),
    "shifts": Shifts(2),
    "jittered": Jittered(1.5),
    "wall": WallClock(),
}
app.conf.beat_schedule = {
    name: {"task": "fleet.note", "schedule": schedule, "options": {"anarchon": {"history_size": 1_000}}}
    for name, schedule in SCHEDULES.items()
}
