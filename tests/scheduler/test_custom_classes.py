"""Schedule classes of other schedulers, as their packages have them: redbeat's rrule, django-celery-beat's own two."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import schedstate
from django_celery_beat.clockedschedule import clocked
from django_celery_beat.tzcrontab import TzAwareCrontab
from redbeat.schedules import rrule

from celery_anarchon.entries import jobs_of
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.replay import Successor
from celery_anarchon.timetable import At, cron_from_text
from celery_anarchon.wire import parse_time, time_text

PARIS = ZoneInfo("Europe/Paris")
MINUTE, DAY = 60_000, 86_400_000


def of(schedule: Any, *, options: dict[str, Any] | None = None, **conf: Any) -> Any:
    app = Celery("proj", set_as_current=False, broker="memory://", timezone="Europe/Paris")
    app.conf.result_expires = None
    app.conf.update(conf)
    schedule = schedule(app) if callable(schedule) else schedule
    app.conf.beat_schedule = {
        "job": {"task": "t", "schedule": schedule, "options": {"anarchon": options or {}}},
    }
    jobs, errors = jobs_of(app)
    if errors:
        raise errors[0]
    return jobs[0].timetable


def slots(timetable: Any, after: str, count: int) -> list[str]:
    found: list[str] = []
    at: int | None = parse_time(after)
    while len(found) < count and (at := timetable.next(at)) is not None:
        found.append(time_text(at))
    return found


# --- redbeat's rrule --------------------------------------------------------------------------------------------------


def daily(app: Celery, **rule: Any) -> Any:
    return rrule("DAILY", dtstart=datetime(2026, 1, 1, tzinfo=PARIS), app=app, **rule)


def test_rrule() -> None:
    found = of(lambda app: daily(app, byhour=(9, 15), byminute=30))
    assert found.zone == PARIS
    assert slots(found, "2026-03-28T10:00Z", 4) == [
        "2026-03-28T14:30:00.000Z",
        "2026-03-29T07:30:00.000Z",
        "2026-03-29T13:30:00.000Z",
        "2026-03-30T07:30:00.000Z",
    ]
    assert found.last(parse_time("2026-03-29T07:29:59.999Z")) == parse_time("2026-03-28T14:30Z")
    assert found.count(parse_time("2026-01-01T00:00Z"), parse_time("2027-01-01T00:00Z")) == 730
    assert found.last(parse_time("2025-12-31T00:00Z")) is None


def test_rrule_where_clocks_change() -> None:
    """As a timed crontab: right after the gap, and once where an hour is repeated. redbeat itself says 03:30."""
    found = of(lambda app: daily(app, byhour=2, byminute=(0, 30)))
    crontab = cron_from_text("0,30 2 * * *", PARIS)
    for after in ("2026-03-27T12:00Z", "2026-10-23T12:00Z"):
        assert slots(found, after, 6) == slots(crontab, after, 6)


def test_rrule_is_the_same_from_anywhere() -> None:
    rule: dict[str, Any] = {"dtstart": datetime(2026, 1, 1, 0, 0, 7, tzinfo=timezone.utc), "interval": 7}
    begin = parse_time("2026-01-01T00:00:07Z")
    forward = of(lambda app: rrule("MINUTELY", app=app, **rule))
    for days in (0, 40, 100, 3, 99, 41):
        at = begin + days * DAY + 1
        expected = begin + -(-(at - begin) // (7 * MINUTE)) * 7 * MINUTE
        if expected == at:
            expected += 7 * MINUTE
        assert forward.next(at) == expected
        assert forward.last(expected) == expected
        assert forward.last(expected - 1) == expected - 7 * MINUTE
        assert forward.count(at, expected + 70 * MINUTE) == 11
        assert of(lambda app: rrule("MINUTELY", app=app, **rule)).next(at) == expected


def test_rrule_that_ends() -> None:
    found = of(lambda app: daily(app, count=3))
    assert len(slots(found, "2025-12-01T00:00Z", 9)) == 3
    until = of(lambda app: daily(app, until=datetime(2026, 1, 3, tzinfo=PARIS)))
    assert slots(until, "2025-12-01T00:00Z", 9) == slots(found, "2025-12-01T00:00Z", 9)
    assert found.next(parse_time("2026-02-01T00:00Z")) is None


def test_rrule_has_one_key_in_every_process() -> None:
    key = of(daily).key
    used = of(daily)
    used.next(parse_time("2026-06-01T00:00Z"))
    assert of(daily).key == used.key == key
    assert of(lambda app: daily(app, interval=2)).key != key


def test_rrule_without_dtstart_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"job 'job': dtstart of this rrule is .*: without one, or with the"):
        of(lambda app: rrule("DAILY", app=app))


# --- django-celery-beat -----------------------------------------------------------------------------------------------


def test_clocked_is_an_instant() -> None:
    found = of(clocked(datetime(2026, 3, 29, 2, 30, tzinfo=timezone(timedelta(hours=1)))))
    assert isinstance(found, At)
    assert found.key == At(parse_time("2026-03-29T01:30Z")).key
    with pytest.raises(ConfigurationError, match="option 'offset' shifts the grid of an interval, and this job is at"):
        of(clocked(datetime(2026, 3, 29, tzinfo=PARIS)), options={"offset": 5})


def test_tz_aware_crontab_is_a_crontab_with_its_zone() -> None:
    found = of(lambda app: TzAwareCrontab(minute="30", hour="2", tz=ZoneInfo("America/New_York"), app=app))
    assert found is cron_from_text("30 2 * * *", "America/New_York")
    # Stock's arithmetic would send without pause in the second pass of that hour.
    assert slots(found, "2026-11-01T05:00Z", 2) == ["2026-11-01T07:30:00.000Z", "2026-11-02T07:30:00.000Z"]


def test_a_subclass_of_tz_aware_crontab() -> None:
    class Weekdays(TzAwareCrontab):  # type: ignore[misc]
        def is_due(self, last_run_at: datetime) -> Any:
            if self.now().astimezone(self.tz).weekday() > 4:
                return schedstate(False, 3_600)
            return super().is_due(last_run_at)

    found = of(lambda app: Weekdays(minute="0", hour="9", tz=ZoneInfo("Asia/Tokyo"), app=app))
    # What fell on Sunday comes on Monday at midnight, unless it ran since: that hangs on the last run.
    assert isinstance(found, Successor)
    assert found.reason == "when it is due depends on when it last ran"
