"""Beats that start at any time name the same slots for a year, byte for byte."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from celery import Celery
from celery.schedules import crontab, schedule, solar

from celery_anarchon.entries import jobs_of
from celery_anarchon.ownschedules import cron, every
from celery_anarchon.wire import parse_time, time_text

BEGIN, END = parse_time("2026-01-01T00:00Z"), parse_time("2027-01-01T00:00Z")
STARTS = ("2025-11-03T07:11:13.999Z", "2025-12-31T23:59:59.999Z", "2026-01-01T00:00Z")
"""Where the beats begin to count: long before the year, and at its very edge."""

DAY = 86_400_000


def definitions() -> dict[str, Any]:
    # In a function, because the beats of this test are processes of their own.
    return {
        "sunrise": solar("sunrise", 48.8566, 2.3522),
        "dusk": solar("dusk_astronomical", -33.8688, 151.2093),
        "noon": solar("solar_noon", 21.3069, -157.8583),
        "polar": solar("sunset", 69.6492, 18.9553),
        "seven": 7 * 60,
        "odd": every("1h1m1s", offset="13s"),
        "spread": every("6h", offset="auto"),
        "stock": schedule(90 * 60),
        "daily": schedule(86_400, relative=True),
        "gap": crontab(minute=30, hour=2),
        "quarter": crontab(minute="*/15"),
        "friday": crontab(minute=0, hour=0, day_of_month=13, day_of_week=5),
        "text": cron("*/20 8-18 * * 1-5", timezone="America/New_York"),
        "leap": cron("0 0 29 2 *", timezone="Asia/Tokyo"),
    }


def year_of(start: str) -> str:
    """What a beat that began at *start* names for the year, as JSON: asked slot by slot from there on."""
    app = Celery("year", set_as_current=False, broker="memory://", timezone="Europe/Paris")
    app.conf.result_expires = None
    app.conf.beat_schedule = {name: {"task": "t", "schedule": value} for name, value in definitions().items()}
    jobs, errors = jobs_of(app)
    assert not errors
    found: dict[str, list[str]] = {}
    for job in jobs:
        slots = found[job.name] = []
        at: int | None = parse_time(start)
        while (at := job.timetable.next(at)) is not None and at <= END:
            if at > BEGIN:
                slots.append(time_text(at))
    return json.dumps(found, sort_keys=True)


def test_three_beats_that_start_at_different_times() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, start],
            env={**os.environ, "PYTHONHASHSEED": str(number), "TZ": zone},
            stdout=subprocess.PIPE,
        )
        for number, (start, zone) in enumerate(zip(STARTS, ("UTC", "Asia/Tokyo", "America/Caracas"), strict=True))
    ]
    # Each on its own hash seed and in a zone of its own, as on three hosts.
    years = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert len({hashlib.sha256(year).hexdigest() for year in years}) == 1
    counts = {name: len(slots) for name, slots in json.loads(years[0]).items()}
    assert counts == {
        "sunrise": 365,
        "dusk": 365,
        "noon": 365,
        "polar": counts["polar"],
        "seven": 365 * 24 * 60 // 7,
        "odd": counts["odd"],
        "spread": 365 * 4,
        "stock": 365 * 16,
        "daily": 365,
        "gap": 365,
        "quarter": 365 * 96,
        "friday": 3,
        "text": 261 * 33,
        "leap": 0,
    }
    # A polar night and a midnight sun of two months each.
    assert 220 < counts["polar"] < 260
    assert counts["odd"] in (365 * 86_400 // 3_661, 365 * 86_400 // 3_661 + 1)


@pytest.mark.parametrize("name", ["sunrise", "polar", "odd", "gap", "quarter", "text"])
def test_where_between_two_slots_one_asks(name: str) -> None:
    app = Celery("year", set_as_current=False, broker="memory://", timezone="Europe/Paris")
    app.conf.beat_schedule = {name: {"task": "t", "schedule": definitions()[name]}}
    jobs, _ = jobs_of(app)
    timetable = next(job.timetable for job in jobs if job.name == name)
    at = BEGIN
    for _ in range(60):
        following = timetable.next(at)
        assert following is not None
        for between in (at, at + 1, (at + following) // 2, following - 1):
            assert timetable.next(between) == following
        assert timetable.last(following) == following
        # A step of days, or nobody comes to March.
        at = timetable.last(following + 5 * DAY) or following


if __name__ == "__main__":
    sys.stdout.write(year_of(sys.argv[1]))
