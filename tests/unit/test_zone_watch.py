"""Beats that read other clock changes out of their zone data name each other."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from support.engine import START, World

from celery_anarchon import entries, events, roster
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.job import Job
from celery_anarchon.options import JobOptions
from celery_anarchon.timetable import cron_from_text

DAY = 86_400_000


def job(zone: str = "Europe/Paris") -> Job:
    return Job(name="report", timetable=cron_from_text("0 3 * * *", zone), options=JobOptions())


def differ(world: World) -> list[tuple[str, tuple[str, ...]]]:
    return [(name, event.zones) for name, event in world.seen if isinstance(event, events.ZonesDiffer)]


@pytest.fixture
def other_data(monkeypatch: pytest.MonkeyPatch) -> Any:
    """From the moment it is called, zones say something else."""
    honest = roster.fingerprints

    def change() -> None:
        monkeypatch.setattr(
            roster,
            "fingerprints",
            lambda zones, at: {name: name[:1] + value for name, value in honest(zones, at).items()},
        )

    return change


def beats(world: World) -> None:
    for beat in list(world.beats.values()):
        beat.tick()
    world.clock.advance(11_000)


def test_each_names_the_other_once(other_data: Any) -> None:
    world = World()
    world.beat("a", job()).tick()
    other_data()
    world.beat("b", job())
    for _ in range(4):
        beats(world)
    assert sorted(differ(world)) == [("a", ("Europe/Paris",)), ("b", ("Europe/Paris",))]


def test_equal_data_and_other_zones_are_no_news(other_data: Any) -> None:
    world = World()
    world.beat("a", job())
    world.beat("b", job())
    beats(world)
    other_data()
    world.beat("c", job("Asia/Tokyo"))
    for _ in range(3):
        beats(world)
    assert differ(world) == []


def test_a_new_day_is_no_news() -> None:
    world = World()
    world.beat("a", job())
    world.beat("b", job())
    beats(world)
    world.clock.advance(START // DAY * DAY + DAY - START - 20_000)
    for _ in range(5):
        beats(world)
    assert differ(world) == []


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(entries, "packaged", lambda: asked.append(True))
    app = Celery("proj", set_as_current=False)
    entries.jobs_of(app)
    app.conf.anarchon_packaged_tzdata = False
    entries.jobs_of(app)
    assert asked == []
    app.conf.anarchon_packaged_tzdata = True
    entries.jobs_of(app)
    assert asked == [True]
    app.conf.anarchon_packaged_tzdata = "yes"
    with pytest.raises(ConfigurationError, match="'anarchon_packaged_tzdata' must be True or False, not 'yes'"):
        entries.jobs_of(app)
