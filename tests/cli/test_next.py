"""``anarchon next``: the slots of a schedule, without a store."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery
from celery.schedules import crontab

from celery_anarchon import at, every
from celery_anarchon.cli.schedule import merged
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.job import Job
from celery_anarchon.options import JobOptions

MIDNIGHT = "2026-03-29T00:00:00Z"


def entry(schedule: Any, **options: Any) -> dict[str, Any]:
    return {"task": "proj.work", "schedule": schedule, "options": {"anarchon": options}}


def slots(answer: Any) -> list[tuple[str, str]]:
    return [(found["job"], found["slot"]) for found in answer.json]


def test_the_slots_of_one_job(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.timezone = "Europe/Paris"
    app.conf.beat_schedule = {"report": entry(crontab(hour=3, minute=0)), "other": entry(1)}
    answer = call("next", "report", "--at", MIDNIGHT, "--count", "2", "--json")
    assert answer.code == 0 and answer.err == ""
    assert answer.json == [
        {"job": "report", "slot": "2026-03-29T01:00:00.000Z"},
        {"job": "report", "slot": "2026-03-30T01:00:00.000Z"},
    ]


def test_all_jobs_ascending_and_by_name_where_slots_meet(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.beat_schedule = {"c": entry(60), "a": entry(60), "b": entry(90)}
    answer = call("next", "--at", MIDNIGHT, "--count", "6", "--json")
    assert slots(answer) == [
        ("a", "2026-03-29T00:01:00.000Z"),
        ("c", "2026-03-29T00:01:00.000Z"),
        ("b", "2026-03-29T00:01:30.000Z"),
        ("a", "2026-03-29T00:02:00.000Z"),
        ("c", "2026-03-29T00:02:00.000Z"),
        ("a", "2026-03-29T00:03:00.000Z"),
    ]


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("2026-03-29T00:00:00Z", "2026-03-29T00:01:00.000Z"),
        ("2026-03-29T00:00:00+00:00", "2026-03-29T00:01:00.000Z"),
        ("2026-03-29T02:00:00+02:00", "2026-03-29T00:01:00.000Z"),
        ("2026-03-28T23:59:59.999Z", "2026-03-29T00:00:00.000Z"),  # strictly after
        ("2026-03-29 01:00", "2026-03-29T00:01:00.000Z"),  # without a zone: the app's
        ("2026-03-29", "2026-03-28T23:01:00.000Z"),
        ("2026-03-29T02:30", "2026-03-29T01:01:00.000Z"),  # the clock skips it: right after the gap
    ],
)
def test_at(app: Celery, call: Callable[..., Any], text: str, first: str) -> None:
    app.conf.timezone = "Europe/Paris"
    app.conf.beat_schedule = {"a": entry(60)}
    assert slots(call("next", "--at", text, "--count", "1", "--json")) == [("a", first)]


def test_without_at_it_is_now(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.beat_schedule = {"a": entry(3600)}
    found = datetime.fromisoformat(call("next", "--json", "--count", "1").json[0]["slot"].replace("Z", "+00:00"))
    assert 0 < found.timestamp() - time.time() <= 3600


def test_jobs_that_end(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.beat_schedule = {
        "launch": entry(at(datetime(2026, 3, 29, 7, tzinfo=timezone.utc))),
        "over": entry(at(datetime(2026, 3, 29, tzinfo=timezone.utc))),
    }
    assert slots(call("next", "--at", MIDNIGHT, "--json")) == [("launch", "2026-03-29T07:00:00.000Z")]
    assert call("next", "over", "--at", MIDNIGHT, "--json").json == []


def test_no_store_is_touched(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.anarchon_backend = "sqlite:////no/such/folder/anarchon.db"
    app.conf.beat_schedule = {"a": entry(60)}
    assert call("next", "--json").code == 0


def test_jobs_that_come_late(app: Celery, call: Callable[..., Any]) -> None:
    @app.on_after_finalize.connect
    def add(sender: Celery, **_: Any) -> None:
        sender.add_periodic_task(every("1m"), sender.signature("proj.work"), name="late")

    assert slots(call("next", "--at", MIDNIGHT, "--count", "1", "--json")) == [("late", "2026-03-29T00:01:00.000Z")]


def test_celerys_own_job_is_there_under_stocks_condition(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.result_expires = 3600
    answer = call("next", "celery.backend_cleanup", "--at", MIDNIGHT, "--count", "1", "--json")
    assert slots(answer) == [("celery.backend_cleanup", "2026-03-29T04:00:00.000Z")]


def test_the_table(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.timezone = "Europe/Paris"
    app.conf.beat_schedule = {"[bold]report[/bold]": entry(crontab(hour=3, minute=0)), "x" * 60: entry(0.5)}
    answer = call("next", "--at", "2026-03-29T00:59:59Z", "--count", "3")
    assert answer.code == 0
    assert "[bold]report[/bold]" in answer.out
    assert "2026-03-29T01:00:00.000Z" in answer.out
    assert "2026-03-29 03:00:00+02:00" in answer.out
    assert "Europe/Paris" in answer.out


# --- what is wrong ----------------------------------------------------------------------------------------------------


def test_an_unknown_job(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.beat_schedule = {"report": entry(60), "export": entry(60)}
    answer = call("next", "reprot", "--json")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == "Error: no job 'reprot' (did you mean 'report'?)\n"


def test_a_bad_entry_is_named_and_the_others_are_shown(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.beat_schedule = {"good": entry(60), "bad": entry(60, jiter=5), "worse": {"task": "proj.work"}}
    answer = call("next", "--at", MIDNIGHT, "--count", "1", "--json")
    assert answer.code == 1
    assert slots(answer) == [("good", "2026-03-29T00:01:00.000Z")]
    assert [line.partition(":")[0] for line in answer.err.splitlines()] == ["Error", "Error"]
    assert "job 'bad'" in answer.err and "'jitter'" in answer.err
    assert "job 'worse'" in answer.err and "'schedule'" in answer.err
    assert "Traceback" not in answer.err


def test_a_bad_entry_that_is_asked_for(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.beat_schedule = {"good": entry(60), "bad": entry(60, jiter=5)}
    answer = call("next", "bad")
    assert (answer.code, answer.out) == (2, "")
    assert "job 'bad'" in answer.err and len(answer.err.splitlines()) == 1
    answer = call("next", "good", "--json")
    assert (answer.code, answer.err) == (0, "")


def test_a_setting_that_cannot_work(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.anarchon_lease = "soon"
    answer = call("next")
    assert answer.code == 2
    assert "anarchon_lease" in answer.err and len(answer.err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--at", "tomorrow"],
        ["--at", "0001-01-01T00:00:00+14:00"],
        ["--at", "9999-12-31T23:59:59Z", "--json"],
        ["--count", "0"],
        ["--count", "many"],
        ["--oops"],
    ],
)
def test_usage(app: Celery, call: Callable[..., Any], arguments: list[str]) -> None:
    app.conf.beat_schedule = {"a": entry(60)}
    answer = call("next", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert "Error" in answer.err and "Traceback" not in answer.err


def test_modules_that_cannot_be_imported(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.imports = ("no_such_module_of_mine",)
    answer = call("next")
    assert answer.code == 2
    assert "no_such_module_of_mine" in answer.err and len(answer.err.splitlines()) == 1


# --- the merge --------------------------------------------------------------------------------------------------------


class Counted:
    """A timetable that counts how often it is asked, and may fail from some instant on."""

    key = "counted"

    def __init__(self, every: int, fails_at: int | None = None) -> None:
        self.every = every
        self.fails_at = fails_at
        self.asked = 0

    def next(self, after: int) -> int:
        self.asked += 1
        if self.fails_at is not None and after >= self.fails_at:
            raise ZeroDivisionError("this timetable is odd")
        return after + self.every - after % self.every

    def last(self, until: int) -> int:
        raise NotImplementedError

    def count(self, after: int, until: int) -> int:
        raise NotImplementedError


def job(name: str, timetable: Counted) -> Job:
    return Job(name=name, timetable=timetable, options=JobOptions())


def test_a_timetable_is_asked_only_for_what_is_taken() -> None:
    tables = [Counted(7), Counted(10), Counted(1_000_000)]
    errors: list[ConfigurationError] = []
    slots = merged([job(f"j{number}", table) for number, table in enumerate(tables)], 0, errors.append)
    assert [next(slots) for _ in range(4)] == [("j0", 7), ("j1", 10), ("j0", 14), ("j1", 20)]
    # Each at the start, and again for each slot taken but the last one.
    assert sum(table.asked for table in tables) == len(tables) + 3
    assert errors == []


def test_a_timetable_that_fails_is_one_jobs_trouble() -> None:
    errors: list[ConfigurationError] = []
    slots = merged([job("odd", Counted(10, fails_at=20)), job("even", Counted(10))], 0, errors.append)
    assert [next(slots) for _ in range(5)] == [("even", 10), ("odd", 10), ("even", 20), ("odd", 20), ("even", 30)]
    assert [str(error) for error in errors] == ["job 'odd': ZeroDivisionError: this timetable is odd"]


def test_ten_thousand_jobs(app: Celery, call: Callable[..., Any]) -> None:
    kinds = [60, crontab(minute="*/5"), crontab(minute=7, hour=3), 3600.5]
    app.conf.beat_schedule = {f"job-{n:05}": entry(kinds[n % len(kinds)]) for n in range(10_000)}
    began = time.monotonic()
    answer = call("next", "--at", MIDNIGHT, "--count", "5", "--json")
    took = time.monotonic() - began
    assert slots(answer) == [(f"job-{n:05}", "2026-03-29T00:01:00.000Z") for n in range(0, 20, 4)]
    # Two seconds on an idle machine; the bound only tells an enumeration from a merge.
    assert took < 20
