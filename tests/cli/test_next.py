"""``anarchon next``: the slots of a schedule, without a store."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, solar

from celery_anarchon import at, every
from celery_anarchon.cli.schedule import merged, touched
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.job import Job
from celery_anarchon.options import JobOptions
from celery_anarchon.solar import Solar
from celery_anarchon.timetable import Interval, cron_from_text
from celery_anarchon.wire import parse_time

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


def test_the_local_time_is_that_of_the_jobs_zone(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.timezone = "Europe/Paris"
    app.conf.beat_schedule = {
        "tokyo": entry(crontab(hour=9, minute=0), timezone="Asia/Tokyo"),
        "grid": entry(every("1h")),
        "sunset": entry(solar("sunset", 48.8566, 2.3522)),
    }
    lines = [line.split() for line in call("next", "--at", MIDNIGHT, "--count", "30").out.splitlines()]
    rows = {line[0]: line[1:] for line in reversed(lines) if line}
    assert rows["tokyo"] == ["2026-03-30T00:00:00.000Z", "2026-03-30", "09:00:00+09:00", "Asia/Tokyo"]
    assert rows["grid"] == ["2026-03-29T01:00:00.000Z", "2026-03-29", "03:00:00+02:00", "Europe/Paris"]
    assert rows["sunset"] == ["2026-03-29T18:16:48.000Z", "2026-03-29", "20:16:48+02:00", "Europe/Paris"]


def test_a_default_zone_is_not_for_solar_jobs(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.anarchon_timezone = "Asia/Tokyo"
    app.conf.beat_schedule = {"sunset": entry(solar("sunset", 48.8566, 2.3522))}
    assert slots(call("next", "--at", MIDNIGHT, "--count", "1", "--json")) == [("sunset", "2026-03-29T18:16:48.000Z")]
    app.conf.beat_schedule = {"sunset": entry(solar("sunset", 48.8566, 2.3522), timezone="Asia/Tokyo")}
    answer = call("next", "sunset")
    assert answer.code == 2
    assert "option 'timezone' is the zone of a crontab" in answer.err and answer.err.endswith("; remove it\n")


def test_a_host_local_zone_of_the_app_is_shown_where_no_zone_matters(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.update(timezone=None, enable_utc=False)
    app.conf.beat_schedule = {"grid": entry(60)}
    answer = call("next", "--at", MIDNIGHT, "--count", "1")
    assert (answer.code, answer.err) == (0, "")
    assert "2026-03-29T00:01:00.000Z" in answer.out


# --- clock changes ----------------------------------------------------------------------------------------------------


def words(text: str, zone: str, slot: str, seconds: bool = False) -> str | None:
    """What is said of a slot of that cron text."""
    timetable = cron_from_text(text, zone, seconds=seconds)
    assert timetable.next(parse_time(slot) - 1) == parse_time(slot)
    touch = touched(timetable, parse_time(slot))
    return None if touch is None else touch.words


@pytest.mark.parametrize(
    ("text", "zone", "slot", "said"),
    [
        # Paris, 29 March: 02:00 -> 03:00
        ("30 2 * * *", "Europe/Paris", "2026-03-29T01:00Z", "moved: the clock skips 02:30"),
        ("0 2 * * *", "Europe/Paris", "2026-03-29T01:00Z", "moved: the clock skips 02:00"),
        ("0,30 2 * * *", "Europe/Paris", "2026-03-29T01:00Z", "merged: 02:00 and 02:30 are one slot"),
        ("0 2,3 * * *", "Europe/Paris", "2026-03-29T01:00Z", "merged: 02:00 and 03:00 are one slot"),
        ("*/20 2 * * *", "Europe/Paris", "2026-03-29T01:00Z", "merged: 02:00, 02:20 and 02:40 are one slot"),
        ("*/5 2 * * *", "Europe/Paris", "2026-03-29T01:00Z", "merged: 02:00, 02:05, 02:10 and 9 more are one slot"),
        ("0 3 * * *", "Europe/Paris", "2026-03-29T01:00Z", None),
        ("59 1 * * *", "Europe/Paris", "2026-03-29T00:59Z", None),
        ("0 4 * * *", "Europe/Paris", "2026-03-29T02:00Z", None),
        ("30 2 * * *", "Europe/Paris", "2026-03-28T01:30Z", None),
        # An every-hour job follows real time.
        ("30 * * * *", "Europe/Paris", "2026-03-29T01:30Z", None),
        ("30 * * * *", "Europe/Paris", "2026-10-25T00:30Z", None),
        # 25 October: 03:00 -> 02:00
        ("30 2 * * *", "Europe/Paris", "2026-10-25T00:30Z", "first of two: the clock shows 02:30 again"),
        ("0 2 * * *", "Europe/Paris", "2026-10-25T00:00Z", "first of two: the clock shows 02:00 again"),
        ("59 1 * * *", "Europe/Paris", "2026-10-24T23:59Z", None),
        ("0 3 * * *", "Europe/Paris", "2026-10-25T02:00Z", None),
        # Half an hour, at 02:00
        ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T15:30Z", "moved: the clock skips 02:15"),
        ("0,30 2 * * *", "Australia/Lord_Howe", "2026-10-03T15:30Z", "merged: 02:00 and 02:30 are one slot"),
        ("45 1 * * *", "Australia/Lord_Howe", "2026-04-04T14:45Z", "first of two: the clock shows 01:45 again"),
        ("15 1 * * *", "Australia/Lord_Howe", "2026-04-04T14:15Z", None),
        # Midnight does not exist.
        ("0 0 * * *", "Africa/Cairo", "2026-04-23T22:00Z", "moved: the clock skips 00:00"),
        # A day does not exist.
        ("30 12 * * *", "Pacific/Apia", "2011-12-30T10:00Z", "moved: the clock skips 2011-12-30 12:30"),
        ("0 0 * * *", "Pacific/Apia", "2011-12-30T10:00Z", "merged: 2011-12-30 00:00 and 00:00 are one slot"),
        ("30 2 * * *", "UTC", "2026-03-29T02:30Z", None),
    ],
)
def test_what_a_clock_change_did(text: str, zone: str, slot: str, said: str | None) -> None:
    assert words(text, zone, slot) == said


def test_what_a_clock_change_did_to_the_second() -> None:
    assert words("30 2 * * * 15", "Europe/Paris", "2026-03-29T01:00Z", True) == "moved: the clock skips 02:30:15"
    assert words("30 2 * * * 15", "Europe/Paris", "2026-10-25T00:30:15Z", True) == (
        "first of two: the clock shows 02:30:15 again"
    )


def test_no_other_schedule_is_touched() -> None:
    assert touched(Interval(60_000), parse_time("2026-03-29T01:00Z")) is None
    assert touched(Solar("sunset", 48.8566, 2.3522), parse_time("2026-03-29T01:00Z")) is None


def test_the_table_marks_them(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.timezone = "Europe/Paris"
    app.conf.beat_schedule = {"nightly": entry(crontab(hour=2, minute=30))}
    out = call("next", "--at", "2026-03-28T12:00Z", "--count", "2").out
    assert "2026-03-29 03:00:00+02:00" in out and out.count("the clock skips 02:30") == 1


def around(app: Celery, call: Callable[..., Any], *arguments: str) -> Any:
    answer = call("next", "--around-dst", "--at", "2026-03-01T00:00Z", *arguments)
    assert (answer.code, answer.err) == (0, "")
    return answer


PARIS_2026 = [
    {
        "zone": "Europe/Paris",
        "at": "2026-03-29T01:00:00.000Z",
        "from": "+01:00",
        "to": "+02:00",
        "jobs": [
            {"job": "nightly", "slots": ["2026-03-29T01:00:00.000Z"]},
            {"job": "twice", "slots": ["2026-03-29T01:00:00.000Z"]},
        ],
    },
    {
        "zone": "Europe/Paris",
        "at": "2026-10-25T01:00:00.000Z",
        "from": "+02:00",
        "to": "+01:00",
        "jobs": [
            {"job": "nightly", "slots": ["2026-10-25T00:30:00.000Z"]},
            {"job": "twice", "slots": ["2026-10-25T00:00:00.000Z", "2026-10-25T00:30:00.000Z"]},
        ],
    },
]


@pytest.fixture
def many(app: Celery) -> Celery:
    app.conf.timezone = "Europe/Paris"
    app.conf.beat_schedule = {
        "twice": entry(crontab(hour=2, minute="0,30")),
        "nightly": entry(crontab(hour=2, minute=30)),
        "noon": entry(crontab(hour=12, minute=0)),
        "often": entry(crontab(minute="*/5")),
        "grid": entry(60),
        "tokyo": entry(crontab(hour=2, minute=30), timezone="Asia/Tokyo"),
    }
    return app


def test_around_dst(many: Celery, call: Callable[..., Any]) -> None:
    assert around(many, call, "--json").json == PARIS_2026


def test_around_dst_of_one_job(many: Celery, call: Callable[..., Any]) -> None:
    nightly = [{**change, "jobs": change["jobs"][:1]} for change in PARIS_2026]
    assert around(many, call, "nightly", "--json").json == nightly
    assert around(many, call, "noon", "--json").json == [{**change, "jobs": []} for change in PARIS_2026]
    assert around(many, call, "tokyo", "--json").json == around(many, call, "grid", "--json").json == []


def test_around_dst_as_a_table(many: Celery, call: Callable[..., Any]) -> None:
    many.conf.beat_schedule["fives"] = entry(crontab(hour=2, minute="*/5"))
    lines = [" ".join(line.split()) for line in around(many, call).out.splitlines()]
    head = "Europe/Paris 2026-03-29T01:00:00.000Z 2026-03-29 02:00 -> 03:00"
    assert f"{head} nightly 2026-03-29T01:00:00.000Z moved: the clock skips 02:30" in lines
    head = "Europe/Paris 2026-10-25T01:00:00.000Z 2026-10-25 03:00 -> 02:00"
    assert f"{head} nightly 2026-10-25T00:30:00.000Z first of two: the clock shows 02:30 again" in lines
    assert f"{head} fives ... and 9 more" in lines
    assert lines[-1] == "No change until 2029-06-13: Asia/Tokyo"
    assert not any("noon" in line or "often" in line or "grid" in line for line in lines)
    quiet = [" ".join(line.split()) for line in around(many, call, "noon").out.splitlines()]
    assert f"{head} - -" in quiet


def test_around_dst_begins_strictly_after(many: Celery, call: Callable[..., Any]) -> None:
    for after, first in (("2026-03-29T00:59:59.999Z", "2026-03-29"), ("2026-03-29T01:00Z", "2026-10-25")):
        found = call("next", "nightly", "--around-dst", "--at", after, "--json").json
        assert found[0]["at"].startswith(first)
        assert len(found) == 2


def test_around_dst_by_zone_and_time(app: Celery, call: Callable[..., Any]) -> None:
    zones = ["America/New_York", "Europe/Paris", "Europe/Berlin", "Africa/Cairo"]
    app.conf.beat_schedule = {zone: entry(crontab(hour=0, minute=0), timezone=zone) for zone in zones}
    found = [(change["at"][:10], change["zone"], len(change["jobs"])) for change in around(app, call, "--json").json]
    assert found == [
        ("2026-03-08", "America/New_York", 0),
        ("2026-03-29", "Europe/Berlin", 0),
        ("2026-03-29", "Europe/Paris", 0),
        ("2026-04-23", "Africa/Cairo", 1),
        ("2026-10-25", "Europe/Berlin", 0),
        ("2026-10-25", "Europe/Paris", 0),
        ("2026-10-29", "Africa/Cairo", 0),
        ("2026-11-01", "America/New_York", 0),
    ]


def test_around_dst_where_nothing_changes_or_is(app: Celery, call: Callable[..., Any]) -> None:
    assert around(app, call, "--json").json == []
    app.conf.beat_schedule = {"a": entry(crontab(hour=2, minute=30))}
    assert around(app, call, "--json").json == []
    assert around(app, call).out.splitlines()[-1] == "No change until 2029-06-13: UTC"
    answer = call("next", "--around-dst", "--at", "9999-12-31T23:59:59Z")
    assert (answer.code, answer.out.splitlines()[-1]) == (0, "No change until 9999-12-29: UTC")


def test_around_dst_names_bad_entries(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.beat_schedule = {"good": entry(crontab(hour=2), timezone="Europe/Paris"), "bad": entry(60, jiter=5)}
    answer = call("next", "--around-dst", "--json")
    assert (answer.code, len(answer.json)) == (1, 2)
    assert "job 'bad'" in answer.err


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
        ["--around-dst", "--count", "10"],
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
    began = time.process_time()
    answer = call("next", "--at", MIDNIGHT, "--count", "5", "--json")
    took = time.process_time() - began
    assert slots(answer) == [(f"job-{n:05}", "2026-03-29T00:01:00.000Z") for n in range(0, 20, 4)]
    # Two seconds on an idle machine; the bound only tells an enumeration from a merge.
    assert took < 20


class Dice(BaseSchedule):  # type: ignore[misc]
    def is_due(self, last_run_at: datetime) -> Any:
        return random.random() < 0.5, 1


class Fridays(crontab):  # type: ignore[misc]
    def is_due(self, last_run_at: datetime) -> Any:
        return super().is_due(last_run_at)


def test_a_class_that_names_no_slots(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.beat_schedule = {"dice": entry(Dice()), "friday": entry(Fridays(0, 0, day_of_week="fri"))}
    answer = call("next", "--at", MIDNIGHT, "--count", "2")
    assert answer.code == 0
    assert "2026-04-03T00:00:00.000Z" in answer.out
    assert "No slots are known beforehand: dice, because it takes random numbers (test_next.py, line " in answer.out
    assert call("next", "dice", "--json").json == []
    assert [each["job"] for each in call("next", "--at", MIDNIGHT, "--count", "2", "--json").json] == ["friday"] * 2
    assert call("next", "--around-dst").code == 0
