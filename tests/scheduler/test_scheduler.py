"""The Celery glue, in one process: definitions in, messages out, on a manual clock and kombu's in-memory transport."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery, chain
from celery.beat import ScheduleEntry
from celery.schedules import crontab, schedule
from django_celery_beat.tzcrontab import TzAwareCrontab
from support.ticking import run_until

import celery_anarchon
from celery_anarchon import Anarchon, Scheduler, at, cron, every, wire
from celery_anarchon.backends.memory import MemoryBackend, MemoryStore
from celery_anarchon.errors import ConfigurationError, OptionError
from celery_anarchon.model import Coalesce, Overlap
from celery_anarchon.options import JobOptions
from celery_anarchon.testing.claimonly import ClaimOnlyMemory, ClaimOnlyStore
from celery_anarchon.testing.clock import ManualClock

START = 1_774_746_000_000  # 2026-03-29T01:00Z
MINUTE = 60_000


class Stage:
    """An app, a store and a clock; schedulers on demand."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("CELERY_ANARCHON_BACKEND", raising=False)
        self.clock = ManualClock(wall=START)
        self.store = MemoryStore(self.clock)
        self.schedulers: list[Scheduler] = []
        self.app = self.new_app()

    def new_app(self, **conf: Any) -> Celery:
        app = Celery("proj", broker=f"memory://localhost/{uuid.uuid4()}", set_as_current=False)
        app.conf.task_default_queue = f"queue-{uuid.uuid4()}"
        app.conf.anarchon_backend = MemoryBackend(store=self.store)
        app.conf.timezone = "UTC"
        app.conf.update(conf)
        return app

    def scheduler(self, app: Celery | None = None, **kwargs: Any) -> Scheduler:
        kind = type("TestScheduler", (Scheduler,), {"clock": self.clock})
        scheduler: Scheduler = kind(app=app or self.app, **kwargs)
        self.schedulers.append(scheduler)
        return scheduler

    def run(self, span: int, *schedulers: Scheduler) -> None:
        ticks = [scheduler.tick for scheduler in schedulers or self.schedulers]
        run_until(self.clock, self.clock.wall() + span, *ticks)

    def messages(self, app: Celery | None = None) -> list[Any]:
        app = app or self.app
        found = []
        with app.connection_for_read() as connection:
            channel = connection.default_channel
            while (message := channel.basic_get(app.conf.task_default_queue)) is not None:
                message.ack()
                found.append(message)
        return found

    def sent(self, app: Celery | None = None) -> list[tuple[str, str]]:
        return [
            (message.headers["anarchon"]["job"], message.headers["anarchon"]["slot"]) for message in self.messages(app)
        ]

    def options(self, name: str) -> JobOptions:
        return self.schedulers[-1]._jobs[name].options


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    stage = Stage(tmp_path, monkeypatch)
    yield stage
    for scheduler in stage.schedulers:
        scheduler.close()


def slots(name: str, *minutes: float) -> list[tuple[str, str]]:
    return [(name, wire.time_text(START + round(minute * MINUTE))) for minute in minutes]


# --- what users have already ------------------------------------------------------------------------------------------


def test_existing_definitions_work_unchanged(stage: Stage) -> None:
    stage.app.conf.beat_schedule = {
        "number": {"task": "t", "schedule": 60},
        "timedelta": {"task": "t", "schedule": timedelta(minutes=2)},
        "schedule": {"task": "t", "schedule": schedule(120)},
        "crontab": {"task": "t", "schedule": crontab(minute="*/2")},
        "every": {"task": "t", "schedule": every("2m")},
        "cron": {"task": "t", "schedule": cron("*/2 * * * *")},
        "at": {"task": "t", "schedule": at(datetime(2026, 3, 29, 1, 1, tzinfo=timezone.utc))},
    }
    for _ in range(3):
        stage.scheduler()
    stage.run(2 * MINUTE)
    expected = [*slots("number", 1, 2), *slots("at", 1)]
    for name in ("timedelta", "schedule", "crontab", "every", "cron"):
        expected += slots(name, 2)
    assert sorted(stage.sent()) == sorted(expected)


class Weighed(ScheduleEntry):  # type: ignore[misc]
    """An entry class of a user's, with a constructor of its own."""

    def __init__(self, weight: int, **given: Any) -> None:
        super().__init__(**given)
        self.weight = weight


def test_an_entry_object_is_the_job_of_its_key(stage: Stage) -> None:
    """Whatever it is named itself, as in stock; and under two keys it is two jobs."""
    named = ScheduleEntry(name="b", task="t", schedule=60, app=stage.app)
    twice = Weighed(7, task="t", schedule=60, args=(1,), kwargs={"y": 2}, options={"priority": 3}, app=stage.app)
    stage.app.conf.beat_schedule = {"a": named, "c": {"task": "t", "schedule": 60}, "d": twice, "e": twice}
    scheduler = stage.scheduler()
    stage.run(MINUTE)
    assert scheduler.dispatcher is not None
    assert set("acde") < {watched.job.name for watched in scheduler.dispatcher.agenda}
    messages = {message.headers["anarchon"]["job"]: message for message in stage.messages()}
    assert set(messages) == set("acde")
    for name in "de":
        entry = scheduler.schedule[name]
        assert (type(entry), entry.weight, entry.name, entry.app) == (Weighed, 7, name, stage.app)
        assert messages[name].properties["priority"] == 3 and messages[name].decode()[:2] == [[1], {"y": 2}]
    assert (named.name, twice.name) == ("b", None), "they are the user's"


def test_add_periodic_task_with_options(stage: Stage) -> None:
    @stage.app.task(shared=False)
    def work(x: int) -> None: ...

    stage.app.add_periodic_task(60, work.s(1), name="work", expires=30, anarchon={"jitter": "5s"})
    stage.scheduler()
    stage.run(2 * MINUTE)
    assert stage.options("work").jitter == 5_000
    (first, *_) = stage.messages()
    assert first.headers["expires"] is not None
    assert "anarchon" not in first.properties


def test_a_canvas_is_sent(stage: Stage) -> None:
    @stage.app.task(shared=False)
    def add(x: int, y: int) -> int:
        return x + y

    stage.app.add_periodic_task(60, chain(add.s(1, 2), add.s(3)), name="chained")
    stage.scheduler()
    stage.run(MINUTE)
    (message,) = stage.messages()
    assert message.headers["anarchon_slot"]["job"] == "chained"


def test_the_default_entry_is_there_as_in_stock(stage: Stage) -> None:
    app = stage.new_app(result_backend="cache+memory://")
    assert "celery.backend_cleanup" not in stage.scheduler(app).schedule, "this result backend expires by itself"
    app = stage.new_app(result_backend="db+sqlite:///results.db", beat_schedule={"a": {"task": "t", "schedule": 60}})
    scheduler = stage.scheduler(app)
    assert set(scheduler.schedule) == {"celery.backend_cleanup", "a"}
    assert scheduler.schedule["celery.backend_cleanup"].options["expires"] == 12 * 3600
    app = stage.new_app(result_backend="db+sqlite:///results.db", result_expires=None)
    assert not stage.scheduler(app).schedule


def test_schedule_file_is_neither_read_nor_written(stage: Stage, tmp_path: Path) -> None:
    stage.app.conf.beat_schedule = {"a": {"task": "t", "schedule": 60}}
    (tmp_path / "celerybeat-schedule").write_bytes(b"\0 no shelf at all")
    stage.scheduler(schedule_filename=str(tmp_path / "celerybeat-schedule"))
    stage.run(MINUTE)
    stage.schedulers[0].close()
    assert (tmp_path / "celerybeat-schedule").read_bytes() == b"\0 no shelf at all"
    assert [path.name for path in tmp_path.iterdir()] == ["celerybeat-schedule"]


def test_the_lazy_instance_touches_nothing(stage: Stage, tmp_path: Path) -> None:
    stage.app.conf.anarchon_backend = "sqlite:///here.db"
    lazy = Scheduler(app=stage.app, lazy=True)
    assert "sqlite" in lazy.info
    assert "here.db" in lazy.info
    assert lazy.max_interval > 0
    lazy.close()
    assert list(tmp_path.iterdir()) == []


# --- options ----------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[Any, Any]] = {
    "jitter": ("7s", 7_000),
    "timeout": (90, 90_000),
    "max_late": ("1h", 3_600_000),
    "history_size": (7, 7),
    "history_ttl": ("2h", 7_200_000),
    "catch_up": ("30m", 1_800_000),
    "coalesce": ("all", Coalesce.ALL),
    "offset": (30, 30_000),
}


def by_entry(stage: Stage, options: dict[str, Any]) -> None:
    stage.app.conf.beat_schedule = {"a": {"task": "t", "schedule": 60, "options": {"anarchon": options}}}


def by_call(stage: Stage, options: dict[str, Any]) -> None:
    stage.app.add_periodic_task(60, stage.app.signature("t"), name="a", anarchon=options)


def by_name(stage: Stage, options: dict[str, Any]) -> None:
    stage.app.conf.beat_schedule = {"a": {"task": "t", "schedule": 60}}
    stage.app.conf.anarchon_jobs = {"a": options}


def by_anarchon(stage: Stage, options: dict[str, Any]) -> None:
    Anarchon(stage.app, **options)
    stage.app.conf.beat_schedule = {"a": {"task": "t", "schedule": 60}}


def by_setting(stage: Stage, options: dict[str, Any]) -> None:
    stage.app.conf.beat_schedule = {"a": {"task": "t", "schedule": 60}}
    stage.app.conf.update({f"anarchon_{name}": value for name, value in options.items()})


PLACES = [by_entry, by_call, by_name, by_anarchon, by_setting]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_in_each_place(stage: Stage, place: Callable[..., None], option: str) -> None:
    given, meant = OPTIONS[option]
    place(stage, {option: given})
    stage.scheduler()
    assert getattr(stage.options("a"), option) == meant


@pytest.mark.parametrize("place", PLACES)
def test_what_options_do_to_slot_and_message(stage: Stage, place: Callable[..., None]) -> None:
    place(stage, {"offset": 30, "timeout": 90})
    stage.scheduler()
    stage.run(MINUTE)
    (message,) = stage.messages()
    assert message.headers["anarchon"]["slot"] == slots("a", 0.5)[0][1]
    assert message.headers["timelimit"] == [90, None]


@pytest.mark.parametrize("place", PLACES)
def test_jitter_delays_the_message_and_not_the_slot(stage: Stage, place: Callable[..., None]) -> None:
    place(stage, {"jitter": 30})
    stage.scheduler()
    stage.run(2 * MINUTE)
    lates = [message.headers["anarchon"]["late"] for message in stage.messages()]
    assert lates
    assert all(0 < late < 30 for late in lates)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("options", "sent"), [({"catch_up": 0}, []), ({}, [4]), ({"coalesce": "all"}, [2, 3, 4]), ({"max_late": 5}, [])]
)
def test_missed_slots_by_option(
    stage: Stage, place: Callable[..., None], options: dict[str, Any], sent: list[float]
) -> None:
    place(stage, options)
    stage.run(MINUTE, stage.scheduler())
    stage.schedulers.pop().close()
    assert stage.sent() == slots("a", 1)
    stage.clock.advance(3 * MINUTE + 20_000)
    app = stage.app
    for _ in range(3):
        stage.scheduler(app)
    stage.run(20_000)
    assert sorted(stage.sent()) == slots("a", *sent)


@pytest.mark.parametrize("place", PLACES)
def test_history_size_by_option(stage: Stage, place: Callable[..., None]) -> None:
    place(stage, {"history_size": 3})
    stage.run(20 * MINUTE, stage.scheduler())
    assert 3 <= len(MemoryBackend(store=stage.store).history("a", 100)) <= 4


def test_precedence_of_the_places(stage: Stage) -> None:
    Anarchon(stage.app, jitter=3)
    stage.app.conf.update(
        anarchon_jitter=4,
        anarchon_jobs={"entry": {"jitter": 2}, "by name": {"jitter": 2}},
        beat_schedule={
            "entry": {"task": "t", "schedule": 60, "options": {"anarchon": {"jitter": 1}}},
            "by name": {"task": "t", "schedule": 60},
            "rest": {"task": "t", "schedule": 60},
        },
    )
    stage.scheduler()
    assert [stage.options(name).jitter for name in ("entry", "by name", "rest")] == [1_000, 2_000, 3_000]


def test_timezone_option_moves_a_crontab(stage: Stage) -> None:
    stage.app.conf.beat_schedule = {
        "paris": {
            "task": "t",
            "schedule": crontab(minute=5, hour=3),
            "options": {"anarchon": {"timezone": "Europe/Paris"}},
        },
        "utc": {"task": "t", "schedule": crontab(minute=5, hour=1)},
    }
    stage.scheduler()
    stage.run(6 * MINUTE)
    assert sorted(stage.sent()) == sorted([*slots("paris", 5), *slots("utc", 5)])


def test_beat_cron_starting_deadline_bounds_crontabs_only(stage: Stage) -> None:
    stage.app.conf.beat_cron_starting_deadline = 100
    stage.app.conf.beat_schedule = {
        "crontab": {"task": "t", "schedule": crontab()},
        "own": {"task": "t", "schedule": crontab(), "options": {"anarchon": {"max_late": 200}}},
        "interval": {"task": "t", "schedule": 60},
    }
    stage.scheduler()
    assert stage.options("crontab").max_late == 100_000
    assert stage.options("own").max_late == 200_000
    assert stage.options("interval").max_late is None


def test_beat_max_loop_interval_bounds_the_wait(stage: Stage) -> None:
    stage.app.conf.beat_schedule = {"a": {"task": "t", "schedule": 3600}}
    stage.app.conf.beat_max_loop_interval = 3
    assert stage.scheduler().tick() <= 3


def test_a_canvas_takes_no_option_about_one_run(stage: Stage) -> None:
    """Its messages are not followed: what is written for it would be ignored, and what is a default is for others."""
    Anarchon(stage.app, overlap="skip", max_attempts=2, queue_timeout="5m", on_unknown="skip", jitter=5)
    steps = {"task": "celery.chain", "schedule": 60}
    stage.app.conf.beat_schedule = {"chained": steps, "single": {"task": "t", "schedule": 60}}
    stage.scheduler()
    assert stage.options("chained") == JobOptions(jitter=5_000)
    assert stage.options("single").overlap is Overlap.SKIP and stage.options("single").queue_timeout == 5 * MINUTE


@pytest.mark.parametrize("task", ["celery.chain", "celery.group", "celery.chord"])
@pytest.mark.parametrize(
    "option", [{"overlap": "skip"}, {"max_attempts": 2}, {"queue_timeout": "5m"}, {"on_unknown": "skip"}]
)
@pytest.mark.parametrize("by_name", [False, True])
def test_an_option_about_one_run_is_refused_for_a_canvas(
    stage: Stage, task: str, option: dict[str, Any], by_name: bool, caplog: pytest.LogCaptureFixture
) -> None:
    Anarchon(stage.app)
    stage.app.conf.beat_schedule = {
        "bad": {
            "task": task,
            "schedule": 60,
            "options": {"anarchon": {"overlap": "allow", **({} if by_name else option)}},
        }
    }
    if by_name:
        del stage.app.conf.beat_schedule["bad"]["options"]
        stage.app.conf.anarchon_jobs = {"bad": option}
    with pytest.raises(SystemExit):
        stage.scheduler()
    for word in ("'bad'", f"'{next(iter(option))}'", task, "many messages"):
        assert word in caplog.text


def test_a_default_timeout_gives_way_to_the_entrys_own_time_limit(stage: Stage) -> None:
    Anarchon(stage.app, timeout=90)
    stage.app.conf.anarchon_timeout = 80
    stage.app.conf.beat_schedule = {
        "own": {"task": "t", "schedule": 60, "options": {"time_limit": 5}},
        "rest": {"task": "t", "schedule": 60},
    }
    stage.scheduler()
    assert (stage.options("own").timeout, stage.options("rest").timeout) == (None, 90_000)
    stage.run(MINUTE)
    limits = {message.headers["anarchon"]["job"]: message.headers["timelimit"][0] for message in stage.messages()}
    assert limits == {"own": 5, "rest": 90}


@pytest.mark.parametrize("place", [by_anarchon, by_setting])
def test_a_default_offset_gives_way_to_the_schedules_own(stage: Stage, place: Callable[..., None]) -> None:
    place(stage, {"offset": "auto"})
    stage.app.conf.beat_schedule = {
        "own": {"task": "t", "schedule": every("1m", offset="10s")},
        "auto": {"task": "t", "schedule": every("1m", offset="auto")},
        "rest": {"task": "t", "schedule": every("1m")},
        "number": {"task": "t", "schedule": 60},
    }
    stage.scheduler()
    assert stage.options("own").offset is None
    assert stage.options("rest").offset == stage.options("number").offset == "auto"
    stage.run(MINUTE)
    sent = dict(stage.sent())
    assert set(sent) == {"own", "auto", "rest", "number"}
    assert sent["own"] == slots("own", 1 / 6)[0][1]


@pytest.mark.parametrize("place", [by_anarchon, by_setting])
def test_a_default_timezone_gives_way_to_the_crontabs_own(stage: Stage, place: Callable[..., None]) -> None:
    place(stage, {"timezone": "Europe/Paris"})
    zoned = crontab(minute=5, hour=6)
    zoned.tz = ZoneInfo("Asia/Karachi")
    stage.app.conf.beat_schedule = {
        "zoned": {"task": "t", "schedule": zoned},
        "django": {"task": "t", "schedule": TzAwareCrontab(minute=5, hour=6, tz=ZoneInfo("Asia/Karachi"))},
        "cron": {"task": "t", "schedule": cron("5 6 * * *", timezone="Asia/Karachi")},
        "rest": {"task": "t", "schedule": crontab(minute=5, hour=3)},
    }
    stage.scheduler()
    assert {name: stage.options(name).timezone for name in ("zoned", "django", "cron", "rest")} == {
        "zoned": None,
        "django": None,
        "cron": None,
        "rest": "Europe/Paris",
    }
    stage.run(6 * MINUTE)
    assert sorted(stage.sent()) == sorted(
        slot for name in ("zoned", "django", "cron", "rest") for slot in slots(name, 5)
    )


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"beat_schedule": {"bad": {"task": "t", "schedule": 0}}}, ["'bad'"]),
        ({"beat_schedule": {"bad": {"task": "t", "schedule": -5}}}, ["'bad'"]),
        ({"beat_schedule": {"bad": {"task": "t", "schedule": "soon"}}}, ["'bad'"]),
        ({"beat_schedule": {"bad": {"task": "t"}}}, ["'bad'", "'schedule' is missing"]),
        ({"beat_schedule": {"bad": {"schedule": 5}}}, ["'bad'", "'task' is missing"]),
        ({"beat_schedule": {"bad": 5}}, ["'bad'", "a mapping"]),
        ({"beat_schedule": [{"task": "t", "schedule": 5}]}, ["'beat_schedule'", "must map"]),
        ({"beat_schedule": {"bad": {"task": "t", "schedule": 5, "argz": ()}}}, ["'bad'", "'argz'", "'args'"]),
        (
            {"beat_schedule": {"bad": {"task": "t", "schedule": 5, "jitter": 5}}},
            ["'bad'", "'jitter'", '"options": {"anarchon"'],
        ),
        ({"beat_schedule": {"bad": {"task": "t", "schedule": 5, "args": 5}}}, ["'bad'", "'args'", "list or tuple"]),
        (
            {"beat_schedule": {"bad": {"task": "t", "schedule": 5, "options": {"anarchon": {"jiter": 1}}}}},
            ["'bad'", "'jiter'", "did you mean 'jitter'"],
        ),
        (
            {
                "beat_schedule": {
                    "bad": {"task": "t", "schedule": 5, "options": {"time_limit": 5, "anarchon": {"timeout": 4}}}
                }
            },
            ["'bad'", "'timeout'", "'time_limit'"],
        ),
        (
            {
                "beat_schedule": {
                    "bad": {"task": "t", "schedule": crontab(), "options": {"anarchon": {"timezone": "Europe/Pari"}}}
                }
            },
            ["'bad'", "Europe/Pari", "Europe/Paris"],
        ),
        (
            {"anarchon_jobs": {"gone": {}}, "beat_schedule": {"gona": {"task": "t", "schedule": 5}}},
            ["'gone'", "'gona'"],
        ),
        ({"anarchon_jobs": ["a"]}, ["anarchon_jobs", "must map"]),
        ({"anarchon_leese": 5}, ["anarchon_leese", "anarchon_lease"]),
        ({"anarchon_lease": 5, "anarchon_heartbeat": 3}, ["anarchon_heartbeat", "third"]),
        ({"anarchon_overlap": "skip"}, ["'overlap'", "worker side"]),
        (
            {"beat_cron_starting_deadline": 0, "beat_schedule": {"late": {"task": "t", "schedule": crontab()}}},
            ["'beat_cron_starting_deadline'", "longer than zero", "0"],
        ),
        (
            {
                "anarchon_backend": ClaimOnlyMemory(store=ClaimOnlyStore()),
                "beat_cron_starting_deadline": 3600,
                "beat_schedule": {"late": {"task": "t", "schedule": crontab()}},
            },
            ["'late'", "'jitter' + setting 'beat_cron_starting_deadline' (3600 s)", "claim-only-memory", "300 s"],
        ),
        ({"anarchon_backend": "sqlight:///a.db"}, ["anarchon_backend", "sqlight", "sqlite"]),
        ({"anarchon_backend": "sqlite:///a.db?tabel=x"}, ["anarchon_backend", "tabel", "table"]),
        ({"anarchon_backend": "mongodb://localhost"}, ["anarchon_backend", "mongodb"]),
        ({"anarchon_backend": 5}, ["anarchon_backend"]),
    ],
)
def test_a_bad_definition_is_one_clear_line_and_exit_2(
    stage: Stage, conf: dict[str, Any], words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    stage.app.conf.update(conf)
    with pytest.raises(SystemExit) as caught:
        stage.scheduler()
    assert caught.value.code == 2
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    text = record.getMessage()
    assert "\n" not in text
    assert record.exc_info is None
    for word in words:
        assert word in text


def test_an_impossible_date_is_refused(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    schedule_ = crontab(minute=0, hour=0, day_of_month=29, month_of_year=2)
    schedule_.day_of_month = {30}
    stage.app.conf.beat_schedule = {"bad": {"task": "t", "schedule": schedule_}}
    with pytest.raises(SystemExit):
        stage.scheduler()
    assert "'bad'" in caplog.text


def test_anarchon_refuses_where_the_job_is_written(stage: Stage) -> None:
    anarchon = Anarchon(stage.app)
    with pytest.raises(OptionError, match="job 'a': option 'jiter'"):
        anarchon.every("a", 60, "t", jiter=5)
    with pytest.raises(ConfigurationError, match="0"):
        anarchon.every("a", 0, "t")
    with pytest.raises(ConfigurationError, match="61"):
        anarchon.cron("a", "61 * * * *", "t")
    anarchon.every("a", 60, "t")
    with pytest.raises(ConfigurationError, match="defined twice"):
        anarchon.cron("a", "* * * * *", "t")
    with pytest.raises(ConfigurationError, match="has an Anarchon already"):
        Anarchon(stage.app, jitter=5)
    with pytest.raises(OptionError, match="'overlap'"):
        Anarchon(stage.new_app(), overlap="never")
    with pytest.raises(OptionError, match="one only"):
        anarchon.at("b", datetime(2030, 1, 1, tzinfo=timezone.utc), "t", overlap="skip")


def test_installed_twice_is_once(stage: Stage) -> None:
    first, second = Anarchon(stage.app), Anarchon(stage.app)
    first.every("a", 60, "t")
    with pytest.raises(ConfigurationError, match="defined twice"):
        second.every("a", 60, "t")
    assert len(stage.app.steps["worker"]) == 1


# --- changes while it runs --------------------------------------------------------------------------------------------


def test_live_changes_of_the_setting(stage: Stage) -> None:
    stage.app.conf.beat_schedule = {"a": {"task": "t", "schedule": 60}}
    scheduler = stage.scheduler()
    stage.run(MINUTE)
    stage.app.conf.beat_schedule["b"] = {"task": "t", "schedule": 60}
    stage.run(MINUTE)
    del stage.app.conf.beat_schedule["a"]
    stage.run(MINUTE)
    stage.app.conf.beat_schedule = {"c": {"task": "t", "schedule": 60}}
    stage.run(MINUTE)
    assert sorted(stage.sent()) == sorted([*slots("a", 1, 2), *slots("b", 2, 3), *slots("c", 4)])
    assert set(scheduler.schedule) == {"c", "celery.backend_cleanup"}


def test_a_change_inside_an_entry_is_seen_by_the_full_compare(stage: Stage) -> None:
    stage.app.conf.beat_max_loop_interval = 30
    stage.app.conf.beat_schedule = {"a": {"task": "t", "schedule": 60}}
    stage.scheduler()
    stage.run(MINUTE)
    stage.app.conf.beat_schedule["a"]["task"] = "u"
    stage.run(MINUTE)
    assert [message.headers["task"] for message in stage.messages()] == ["t", "u"]


def test_a_schedule_that_cannot_be_read_is_said_once_and_the_old_one_goes_on(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever leaves a tick ends beat."""
    stage.app.conf.beat_schedule = {"a": {"task": "t", "schedule": 60}}
    scheduler = stage.scheduler()
    stage.run(MINUTE)
    stage.app.conf.beat_schedule = ["b"]
    stage.run(2 * MINUTE)
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "'beat_schedule'" in record.getMessage() and record.exc_info is None
    stage.app.conf.beat_schedule = {"c": {"task": "t", "schedule": 60}}
    stage.run(MINUTE)
    assert stage.sent() == [*slots("a", 1, 2, 3), *slots("c", 4)]
    assert set(scheduler.schedule) == {"c", "celery.backend_cleanup"}


def test_a_failing_look_at_the_schedule_does_not_end_beat(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage.app.conf.beat_schedule = {"a": {"task": "t", "schedule": 60}}
    scheduler = stage.scheduler()
    stage.run(MINUTE)
    stage.app.conf.beat_schedule["b"] = {"task": "t", "schedule": 60}
    with monkeypatch.context() as patched:
        patched.setattr(scheduler, "install_default_entries", lambda _: {}["result_expires"])
        stage.run(MINUTE)
    stage.run(MINUTE)
    assert sorted(stage.sent()) == [*slots("a", 1, 2, 3), *slots("b", 2, 3)]
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1 and errors[0].exc_info


def test_scheduler_add_as_in_stock(stage: Stage) -> None:
    scheduler = stage.scheduler()
    scheduler.tick()
    entry = scheduler.add(name="added", task="t", schedule=schedule(60))
    assert isinstance(entry, ScheduleEntry)
    stage.run(MINUTE)
    assert stage.sent() == slots("added", 1)


def test_an_entry_object_set_under_another_name_is_one_jobs_trouble(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.app.conf.beat_schedule = {"a": {"task": "t", "schedule": 60}}
    scheduler = stage.scheduler()
    scheduler.tick()
    scheduler.schedule["x"] = ScheduleEntry(name="y", task="t", schedule=60, app=stage.app)
    stage.run(MINUTE)
    assert stage.sent() == slots("a", 1)
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "job 'x'" in record.getMessage() and "'y'" in record.getMessage()


def test_a_job_that_turns_bad_is_reported_and_the_others_go_on(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.app.conf.beat_schedule = {"a": {"task": "t", "schedule": 60}, "b": {"task": "t", "schedule": 60}}
    stage.scheduler()
    stage.run(MINUTE)
    stage.app.conf.beat_schedule["a"] = {"task": "t", "schedule": 0}
    stage.run(2 * MINUTE)
    assert sorted(stage.sent()) == sorted([*slots("a", 1), *slots("b", 1, 2, 3)])
    assert len([record for record in caplog.records if "'a'" in record.getMessage()]) == 1
    stage.app.conf.beat_schedule["a"] = {"task": "t", "schedule": 60}
    stage.run(MINUTE)
    # While it was bad nobody sent it: the latest missed slot is caught up, as after any downtime.
    assert sorted(stage.sent()) == sorted([*slots("a", 3, 4), *slots("b", 4)])


# --- Anarchon(app) ----------------------------------------------------------------------------------------------------


def test_anarchon_defines_jobs_and_reads_runs(stage: Stage) -> None:
    @stage.app.task(shared=False)
    def work(x: int, y: int = 0) -> None: ...

    anarchon = Anarchon(stage.app, jitter=0)
    anarchon.every("every", "1m", work, (1,), {"y": 2}, options={"priority": 3}, history_size=5)
    anarchon.cron("cron", "2 * * * *", work, timezone="Asia/Kolkata")
    anarchon.at("at", datetime(2026, 3, 29, 1, 1, tzinfo=timezone.utc), work.s(1))
    assert stage.app.conf.beat_scheduler == "celery_anarchon:Scheduler"
    stage.scheduler()
    stage.run(2 * MINUTE)
    messages = stage.messages()
    by_job = {message.headers["anarchon"]["job"]: message for message in messages}
    assert by_job["every"].decode()[:2] == [[1], {"y": 2}]
    assert by_job["every"].properties["priority"] == 3
    assert set(by_job) == {"every", "at"}
    run = anarchon.last_run("every")
    assert run is not None
    assert run.slot == datetime(2026, 3, 29, 1, 2, tzinfo=timezone.utc)
    assert run.run_id == by_job["every"].headers["id"] == anarchon.run_id("every", run.slot)
    assert run.run_id == celery_anarchon.run_id("every", wire.time_text(START + 2 * MINUTE), namespace="anarchon_runs")
    assert [past.slot.minute for past in anarchon.history("every", 5)] == [2, 1]
    anarchon.close()
    anarchon.close()


def test_anarchon_leaves_a_chosen_scheduler_alone(stage: Stage) -> None:
    app = stage.new_app(beat_scheduler="mine:Scheduler")
    Anarchon(app)
    assert app.conf.beat_scheduler == "mine:Scheduler"
    app = Celery("late", set_as_current=False)
    Anarchon(app)
    app.conf.timezone = "UTC"
    assert app.conf.beat_scheduler == "celery_anarchon:Scheduler"


def test_the_run_id_is_the_documented_uuid() -> None:
    expected = uuid.uuid5(
        uuid.uuid5(uuid.NAMESPACE_URL, "celery-anarchon"), '["cron:","zählung","2026-03-29T01:00:00.000Z"]'
    )
    assert celery_anarchon.run_id("zählung", START, namespace="cron:") == str(expected)
