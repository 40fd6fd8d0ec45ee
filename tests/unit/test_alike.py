"""What is alike in many jobs is kept once, and what differs stays apart."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from celery.schedules import crontab, schedule
from hypothesis import given
from hypothesis import strategies as st

from celery_anarchon.crontable import cron_from_text
from celery_anarchon.entries import ANY_STORE, JobFactory
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.job import Job
from celery_anarchon.timetable import Interval, zone_of

NOON = 1_774_785_600_000
DAY = 86_400_000


def jobs(*definitions: dict[str, Any], **settings: Any) -> list[Job]:
    app = Celery("alike", set_as_current=False)
    app.conf.update({"timezone": "Europe/Paris", **settings})
    factory = JobFactory(app, ANY_STORE)
    return [factory.job(factory.entry(f"job {n}", {"task": "t", **one})) for n, one in enumerate(definitions)]


@pytest.mark.parametrize("interval", [30, 30.0, timedelta(seconds=30)])
def test_equal_intervals_share_their_objects(interval: Any) -> None:
    one, two = jobs({"schedule": interval}, {"schedule": interval})
    assert one.timetable is two.timetable
    assert one.options is two.options
    assert one.payload.schedule is two.payload.schedule
    assert type(one.payload.schedule) is schedule and one.payload.schedule.run_every == timedelta(seconds=30)


def test_a_relative_interval_is_another_schedule() -> None:
    grid, relative = jobs({"schedule": 3600}, {"schedule": 3600, "relative": True})
    assert relative.payload.schedule.relative and not grid.payload.schedule.relative
    assert grid.timetable.key.startswith("interval") and relative.timetable.key.startswith("cron")


def test_options_of_one_job_are_not_those_of_the_next() -> None:
    own, plain, same, cron = jobs(
        {"schedule": 60, "options": {"anarchon": {"jitter": 5}}},
        {"schedule": 60},
        {"schedule": 60, "options": {"anarchon": {"jitter": 5}}},
        {"schedule": crontab()},
        anarchon_offset=7,
        beat_cron_starting_deadline=90,
    )
    assert own.options.jitter == 5_000 and plain.options.jitter == 0
    assert own.options is same.options
    assert plain.options.offset == 7_000 and cron.options.offset is None, "a default for those that can take it"
    assert cron.options.max_late == 90_000 and plain.options.max_late is None
    assert plain.timetable.key == own.timetable.key == "interval 60000 7000"


def test_options_by_name_are_for_that_name() -> None:
    named, plain = jobs({"schedule": 60}, {"schedule": 60}, anarchon_jobs={"job 0": {"jitter": 3}})
    assert named.options.jitter == 3_000 and plain.options.jitter == 0


def test_each_job_is_told_that_the_app_has_no_zone() -> None:
    app = Celery("alike", set_as_current=False)
    app.conf.update(timezone=None, enable_utc=False)
    factory = JobFactory(app, ANY_STORE)
    for name in ("one", "two"):
        with pytest.raises(ConfigurationError, match=f"job '{name}': enable_utc=False without a timezone"):
            factory.job(factory.entry(name, {"task": "t", "schedule": crontab()}))
    assert factory.job(factory.entry("three", {"task": "t", "schedule": 5})).timetable.key == "interval 5000 0"


def test_a_crontab_keeps_its_meaning_when_its_sets_are_shared() -> None:
    one, two, untouched = crontab("*/5", "8-18"), crontab("*/5", "8-18"), crontab("*/5", "8-18")
    jobs({"schedule": one}, {"schedule": two})
    assert one.minute is two.minute and one.day_of_month is two.day_of_month
    assert one == untouched and hash(frozenset(one.hour)) == hash(frozenset(untouched.hour))
    assert pickle.loads(pickle.dumps(one)) == untouched
    untouched.app = one.app
    last = one.now() - timedelta(days=1)
    one.nowfun = two.nowfun = untouched.nowfun = lambda: last + timedelta(hours=20)
    assert one.is_due(last) == untouched.is_due(last)


@given(
    text=st.sampled_from(["*/7 * * * *", "30 2 * * *", "0 0 29 2 *", "0 9 * * 1-5"]),
    asked=st.lists(st.integers(NOON - 3 * 365 * DAY, NOON + 3 * 365 * DAY), min_size=2, max_size=12),
    steps=st.lists(st.integers(-2, 2 * DAY), max_size=6),
)
def test_what_a_crontab_remembers_changes_no_answer(text: str, asked: list[int], steps: list[int]) -> None:
    """It answers out of memory only between the instant that was asked about and the slot that was found."""
    shared = cron_from_text(text, "Europe/Paris")

    def afresh(after: int) -> int | None:
        return type(shared)(shared.fields, zone_of("Europe/Paris")).next(after)

    for instant in [one + step for one in asked for step in (0, *steps)]:
        found = shared.next(instant)
        assert found == afresh(instant)
        if found is not None:
            assert shared.next(found - 1) == found
            assert shared.next(found) == afresh(found)


def test_an_interval_tells_one_number_to_all() -> None:
    grid = Interval(DAY)
    assert grid.next(NOON) is grid.next(NOON + 1)
    assert grid.next(NOON + DAY) == grid.next(NOON) + DAY
