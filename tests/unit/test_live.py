"""A schedule that notices its own changes."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_anarchon.live import CountingDict, WatchedSchedule
from celery_anarchon.testing.clock import ManualClock

A: dict[str, Any] = {"task": "t", "schedule": 5}


def test_a_counting_dict_notices_each_way_to_change_it() -> None:
    counted = CountingDict({"a": 1, "b": 2, "c": 3, "d": 4})
    assert counted.take_touched() == set()
    counted["e"] = 5
    del counted["a"]
    counted.update({"b": 3}, f=6)
    counted.pop("c")
    counted.pop("no such", None)
    counted.setdefault("b", 9)
    counted.setdefault("g", 7)
    counted |= {"h": 8}
    assert counted.take_touched() == {"a", "b", "c", "e", "f", "g", "h"}
    assert counted.take_touched() == set()
    name, _ = counted.popitem()
    assert counted.take_touched() == {name}
    counted.clear()
    assert counted.take_touched() == {"d", "b", "e", "f", "g"}
    assert counted == {}


class Incomparable:
    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")

    __hash__ = None  # type: ignore[assignment]


def test_what_cannot_be_compared_may_have_changed_and_hides_no_other(app: Celery) -> None:
    """An array as an argument is one such value."""
    app.conf.beat_schedule = {"a": {**A, "args": [Incomparable()]}, "b": dict(A), "c": dict(A)}
    clock = ManualClock()
    watched = WatchedSchedule(app, 60, clock)
    app.conf.beat_schedule["a"]["args"] = [Incomparable()]
    app.conf.beat_schedule["b"]["schedule"] = 6
    clock.advance(61_000)
    assert watched.changed() == {"a", "b"}


@pytest.fixture
def app() -> Celery:
    app = Celery("live", set_as_current=False)
    app.conf.beat_schedule = {"a": dict(A), "b": dict(A)}
    return app


def test_changes_are_seen_once(app: Celery) -> None:
    watched = WatchedSchedule(app, 60, ManualClock())
    assert watched.changed() == set()
    app.conf.beat_schedule["c"] = dict(A)
    del app.conf.beat_schedule["a"]
    assert watched.changed() == {"a", "c"}
    assert watched.changed() == set()
    app.conf.beat_schedule = {"b": dict(A), "d": dict(A)}
    assert watched.changed() == {"c", "d"}, "b is what it was"
    assert watched.changed() == set()
    app.add_periodic_task(5, app.signature("t"), name="e")
    assert watched.changed() == {"e"}


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.update(schedule=6),
        lambda entry: entry.update(options={"queue": "q"}),
        lambda entry: entry["args"].append(1),
        lambda entry: entry["kwargs"].update(x=1),
        lambda entry: entry["options"]["anarchon"].update(jitter=3),
    ],
)
def test_a_change_inside_an_entry_waits_for_the_full_compare(app: Celery, change: Any) -> None:
    clock = ManualClock()
    app.conf.beat_schedule["a"] = {**A, "args": [], "kwargs": {}, "options": {"anarchon": {}}}
    watched = WatchedSchedule(app, 60, clock)
    change(app.conf.beat_schedule["a"])
    assert watched.changed() == set()
    clock.advance(60_000)
    assert watched.changed() == {"a"}
    clock.advance(60_000)
    assert watched.changed() == set()


def test_a_mapping_that_the_user_still_holds_is_not_forgotten() -> None:
    held = {"a": dict(A), "b": dict(A)}
    app = Celery("live", set_as_current=False)
    app.conf.beat_schedule = held
    clock = ManualClock()
    watched = WatchedSchedule(app, 60, clock)
    held["c"] = dict(A)
    del held["a"]
    held["b"]["schedule"] = 7
    clock.advance(60_000)
    assert watched.changed() == {"a", "b", "c"}
    assert set(app.conf.beat_schedule) == {"b", "c"}


def test_the_mapping_that_the_user_holds_is_compared_with_what_it_was_itself() -> None:
    """One picture serves for both mappings, until one of them changes."""
    held = {"a": dict(A), "b": dict(A)}
    app = Celery("live", set_as_current=False)
    app.conf.beat_schedule = held
    clock = ManualClock()
    watched = WatchedSchedule(app, 60, clock)
    app.conf.beat_schedule["b"] = {**A, "schedule": 9}
    assert watched.changed() == {"b"}
    clock.advance(60_000)
    assert watched.changed() == set()
    assert app.conf.beat_schedule["b"]["schedule"] == 9, "nothing changed in the mapping that the user holds"


@pytest.mark.parametrize(("before", "after"), [([1], (1,)), ({"a": 1}, [("a", 1)]), ({"a": 1}, (("a",), 1))])
def test_a_change_of_type_inside_an_entry_is_a_change(app: Celery, before: Any, after: Any) -> None:
    clock = ManualClock()
    app.conf.beat_schedule["a"] = {**A, "args": [before]}
    watched = WatchedSchedule(app, 60, clock)
    app.conf.beat_schedule["a"]["args"] = [after]
    clock.advance(60_000)
    assert watched.changed() == {"a"}


def test_under_a_namespace() -> None:
    class Settings:
        CELERY_BEAT_SCHEDULE = {"a": dict(A)}  # noqa: RUF012 - settings modules look like this

    app = Celery("live", set_as_current=False)
    app.config_from_object(Settings, namespace="CELERY")
    watched = WatchedSchedule(app, 60, ManualClock())
    app.conf.beat_schedule["b"] = dict(A)
    assert watched.changed() == {"b"}
