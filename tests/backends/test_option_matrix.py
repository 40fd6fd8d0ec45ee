"""Which options each store takes: every cell of the table seen to work on a real store, or refused in words.

The table is written by hand, and says what users are promised; nothing of it is computed from the code.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cached_property
from typing import Any

import pytest
from celery import Celery
from support.columns import STORES, UNASKED, Beats, Servers, history, slot_of
from support.waiting import wait_for

from celery_anarchon import Anarchon, Scheduler
from celery_anarchon.backends.base import AgedBackend, LeaseBackend
from celery_anarchon.backends.redis.keys import Keys
from celery_anarchon.backends.runs import Worker
from celery_anarchon.clock import SystemClock
from celery_anarchon.errors import OptionError
from celery_anarchon.model import Millis
from celery_anarchon.options import JOB_OPTIONS, LATER_SETTINGS, OWN_SETTINGS

COLUMNS = list(STORES)

TABLE = """
                 redis                          valkey                   postgres sqlite libsql  rabbitmq       nats
                 lease  stream-id idmp  script  lease  stream-id script                          queue  stream
jitter           yes    yes       yes   yes     yes    yes       yes     yes      yes    yes     yes    yes     yes
timeout          yes    yes       yes   yes     yes    yes       yes     yes      yes    yes     yes    yes     yes
args             yes    yes       yes   yes     yes    yes       yes     yes      yes    yes     yes    yes     yes
kwargs           yes    yes       yes   yes     yes    yes       yes     yes      yes    yes     yes    yes     yes
offset           yes    yes       yes   yes     yes    yes       yes     yes      yes    yes     yes    yes     yes
timezone         yes    yes       yes   yes     yes    yes       yes     yes      yes    yes     yes    yes     yes
max_late         yes    yes       yes   yes     yes    yes       yes     yes      yes    yes     yes    yes     yes
history_size     yes    yes       yes   yes     yes    yes       yes     yes      yes    yes     yes    yes     shared
history_ttl      yes    yes       yes   yes     yes    yes       yes     yes      yes    yes     no     no      no
overlap          yes    no        no    no      yes    no        no      yes      yes    yes     no     no      no
max_attempts     yes    no        no    no      yes    no        no      yes      yes    yes     no     no      no
queue_timeout    yes    no        no    no      yes    no        no      yes      yes    yes     no     no      no
on_unknown       yes    no        no    no      yes    no        no      yes      yes    yes     no     no      no
catch_up         yes    no        no    no      yes    no        no      yes      yes    yes     no     no      no
coalesce         yes    no        no    no      yes    no        no      yes      yes    yes     no     no      no
anarchon_lease   yes    no        no    no      yes    no        no      yes      yes    yes     no     no      no
anarchon_heartbeat yes  no        no    no      yes    no        no      yes      yes    yes     no     no      no
anarchon_max_skew yes   no        no    no      yes    no        no      yes      yes    yes     no     no      no
anarchon_early_tolerance yes yes  yes   yes     yes    yes       yes     yes      yes    yes     yes    yes     yes
anarchon_batch   yes    yes       yes   yes     yes    yes       yes     yes      yes    yes     yes    yes     yes
"""

ROWS = {line.split()[0]: line.split()[1:] for line in TABLE.splitlines()[3:]}
CELLS = {(option, column): word for option, row in ROWS.items() for column, word in zip(COLUMNS, row, strict=True)}

ELSEWHERE = {
    "backend": "each store of this table is one",
    "app_name": "tests/backends: a namespace of another app is refused",
    "jobs": "tests/unit/test_options.py: precedence",
    "one_step": "tests/unit/test_one_step.py, and the clauses O of the conformance kit",
    "packaged_tzdata": "tests/fleet/test_zone_data.py: no store has a part in it",
    "gate_wait": "tests/worker/test_gate.py: what a worker does while it cannot ask; refused below",
}
"""Settings that are no row of the table, and where they are tried."""

SECOND: Millis = 1_000
MINUTE: Millis = 60 * SECOND

JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "jitter": {"jitter": 20},
    "timeout": {"timeout": "45s"},
    "offset": {"offset": 13},
    "max_late": {"max_late": 20},
    "history_size": {"history_size": 2},
    "history_ttl": {"history_ttl": "1ms"},
    "overlap": {"overlap": "skip"},
    "max_attempts": {"max_attempts": 2},
    "queue_timeout": {"queue_timeout": "7m"},
    "on_unknown": {"on_unknown": "skip"},
    "catch_up": {"catch_up": 150, "coalesce": "all"},
    "coalesce": {"coalesce": "all"},
}
"""Of each minute. One job is named after its option."""

SETTINGS: dict[str, Any] = {
    "lease": 150,
    "heartbeat": 40,
    "max_skew": "1h",
    "early_tolerance": "30m",
    "batch": 4,
}
STREAMS_KEEP = 1_200
"""More than the 1000 runs that NATS keeps by default."""

SENT_EVERYWHERE = {"plain", "jitter", "timeout", "offset", "max_late", "history_size", "args", "kwargs", "timezone"}


def honoured(option: str, column: str) -> bool:
    return CELLS[option, column] != "no"


class Told:
    """What a beat's life of five minutes left behind on one store, ten minutes without one, and another beat's. It is
    lived when it is first asked for."""

    def __init__(self, column: str, servers: Servers) -> None:
        self.column = column
        self.servers = servers
        while not self._begin():
            self.end()
        beats = self.beats
        beats.run(self.first + 4 * MINUTE + 50 * SECOND)
        self._age_for_script()
        beats.run(self.first + 4 * MINUTE + 55 * SECOND)
        beats.stop()
        self.sent_before = list(beats.arrived)
        beats.clock.advance(9 * MINUTE + 35 * SECOND)
        beats.start()
        beats.run(self.first + 14 * MINUTE + 40 * SECOND)
        self.sent_after = beats.arrived[len(self.sent_before) :]
        self.messages = beats.messages()

    def _begin(self) -> bool:
        """The first tick, at which a store notes since when each job is scheduled. False: a minute ended meanwhile, and
        its slot may be owed or not."""
        space = f"t{uuid.uuid4().hex[:12]}"
        self.space = f"{space}:" if "redis" in self.column or "valkey" in self.column else space
        settings = {name: SETTINGS[name] for name in SETTINGS if honoured(f"anarchon_{name}", self.column)}
        self.beats = Beats(self.make(), **settings)
        self.first = (self.beats.clock.wall() // MINUTE + 1) * MINUTE
        """The first slot that is looked at. On a store that keeps no first sights there may be one before it."""
        self._define()
        self.beats.start()
        self.beats.beat.tick()
        return SystemClock().wall() < self.first

    def make(self) -> Any:
        return STORES[self.column](self.servers, self.space)

    def end(self) -> None:
        self.beats.stop()
        self.beats.app.close()

    def _define(self) -> None:
        add = self.beats.anarchon.every
        for job, options in JOBS.items():
            given = dict(options)
            if self.column.endswith(":script") and job == "history_ttl":
                # There it must be longer than the window.
                given["history_ttl"] = "25h"
            if self.column == "nats" and job == "history_size":
                given["history_size"] = STREAMS_KEEP
            if job in SENT_EVERYWHERE or honoured(job, self.column):
                add(job, MINUTE / SECOND, "task", **given)
        add("args", 60, "task", args=(1, "two"))
        add("kwargs", 60, "task", kwargs={"three": 4})
        # In Kolkata, half an hour off, it is that minute when the first slot comes.
        minute = (self.first // MINUTE + 30) % 60
        self.beats.anarchon.cron("timezone", f"{minute} * * * *", "task", timezone="Asia/Kolkata")

    def _age_for_script(self) -> None:
        """Records that are older than the window of a day, for which nobody waits."""
        if not self.column.endswith(":script"):
            return
        with self.server.client() as client:
            key = Keys(self.space).runs(b"history_ttl")
            for slot in client.hkeys(key):
                if slot.isdigit() and int(slot) <= self.first:
                    run = json.loads(client.hget(key, slot))
                    aged = {name: at - 26 * 60 * MINUTE for name, at in run.items() if name.endswith("_at")}
                    client.hset(key, slot, json.dumps({**run, **aged}))

    @property
    def server(self) -> Any:
        return self.servers.valkey if self.column.startswith("valkey") else self.servers.redis

    def message(self, job: str) -> Any:
        """The first one of a job."""
        return next(message for message in self.messages if message.headers["anarchon"]["job"] == job)

    @cached_property
    def with_workers(self) -> WithWorkers:
        return WithWorkers(self.column, self.servers)

    def header(self, job: str) -> Any:
        return self.message(job).headers["anarchon"]

    def minutes(self, job: str, *, after: bool) -> list[float]:
        """Slots that were sent, as minutes since the first; of the second beat or of the first."""
        sent = self.sent_after if after else self.sent_before
        return sorted((slot - self.first) / MINUTE for name, slot, _ in sent if name == job and slot >= self.first)

    def history(self, job: str) -> list[Any]:
        return history(self.make(), job)

    def kept(self, job: str) -> list[float]:
        return sorted((slot_of(run) - self.first) / MINUTE for run in self.history(job))


class WithWorkers(Told):
    """The first messages of a fleet that has workers: there runs are followed."""

    def __init__(self, column: str, servers: Servers) -> None:
        self.column = column
        self.servers = servers
        while not self._begin():
            self.end()
        self.beats.run(self.first + 5 * SECOND)
        self.messages = self.beats.messages()
        self.end()

    def _define(self) -> None:
        with closing(self.make()) as store:
            store.open("columns")
            store.worker_seen(Worker(owner="worker", label="worker", version="1"))
        super()._define()


# --- what each option does, where it is honoured ----------------------------------------------------------------------


def jitter(told: Told) -> None:
    delays = {slot: at - slot for job, slot, at in told.sent_before if job == "jitter" and slot >= told.first}
    assert len(delays) >= 5 and all(0 <= delay < 20 * SECOND for delay in delays.values())
    assert len(set(delays.values())) > 1, "nothing was spread"
    assert all(at - slot < SECOND for job, slot, at in told.sent_before if job == "plain" and slot >= told.first)


def timeout(told: Told) -> None:
    assert told.message("timeout").headers["timelimit"][0] == 45
    assert told.message("plain").headers["timelimit"][0] is None


def args(told: Told) -> None:
    assert told.message("args").decode()[0] == [1, "two"]


def kwargs(told: Told) -> None:
    assert told.message("kwargs").decode()[1] == {"three": 4}


def offset(told: Told) -> None:
    sent = [slot for job, slot, _ in told.sent_before if job == "offset"]
    assert len(sent) >= 5 and {slot % MINUTE for slot in sent} == {13 * SECOND}


def timezone(told: Told) -> None:
    assert told.minutes("timezone", after=False) == [0]


def max_late(told: Told) -> None:
    """The second beat starts half a minute after the last slot."""
    assert told.minutes("max_late", after=False) == [0, 1, 2, 3, 4]
    assert told.minutes("max_late", after=True) == []


def history_size(told: Told) -> None:
    if CELLS["history_size", told.column] == "shared":
        # One size for all of its jobs, the largest.
        config = told.servers.nats.api(f"STREAM.INFO.{told.space}_HISTORY")["config"]
        assert config["max_msgs_per_subject"] == STREAMS_KEEP
        return
    kept = told.kept("history_size")
    # Where slots that were given up are recorded, the 13th is one of them.
    assert len(kept) == 2 and kept[-1] == 14, kept
    assert {0, 1, 2, 3, 4, 14} <= set(told.kept("plain"))


def history_ttl(told: Told) -> None:
    assert told.minutes("history_ttl", after=False) == [0, 1, 2, 3, 4]
    kept = told.kept("history_ttl")
    # Without it they would all be there.
    assert 0 not in kept, kept
    assert 0 in told.kept("plain")


def overlap(told: Told) -> None:
    """No worker ends the first run."""
    assert told.minutes("overlap", after=False) == [0]
    runs = told.history("overlap")
    assert [str(run.state) for run in runs[-5:]] == ["skipped"] * 4 + ["queued"]
    assert {run.blocked_by for run in runs[-5:-1]} == {runs[-1].run_id}
    assert told.header("overlap")["overlap"] == "skip"


def max_attempts(told: Told) -> None:
    assert told.header("max_attempts")["max_attempts"] == 2
    assert told.with_workers.header("plain")["max_attempts"] is None


def queue_timeout(told: Told) -> None:
    assert told.with_workers.header("queue_timeout")["queue_timeout"] == 420


def on_unknown(told: Told) -> None:
    assert told.header("on_unknown")["on_unknown"] == "skip"
    assert told.with_workers.header("plain")["on_unknown"] == "repeat"


def catch_up(told: Told) -> None:
    """Two minutes and a half before the second beat started."""
    assert told.minutes("catch_up", after=True) == [13, 14]


def coalesce(told: Told) -> None:
    assert told.minutes("coalesce", after=True) == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def anarchon_lease(told: Told) -> None:
    assert {request.lease for batch in told.beats.batches for request in batch} == {150 * SECOND}
    assert told.with_workers.header("plain")["lease"] == 150


def anarchon_heartbeat(told: Told) -> None:
    """Of 40 s, and not the 50 s that are a third of the lease."""
    beats = told.beats
    reader = told.make()
    reader.open("columns", create=False)
    try:
        beats.run(beats.clock.wall() + 60 * SECOND)
        wait = told.beats.beat.dispatcher._roster.next_at() - beats.clock.monotonic()
        assert 0 < wait <= 40

        def seen() -> Millis:
            (beat,) = reader.beats(within=MINUTE)
            return int(beat.seen)

        before = seen()
        wait_for(lambda: reader.now() > before, "a later moment of the store")
        beats.clock.advance(round(wait * SECOND) - 1)
        beats.beat.tick()
        assert seen() == before
        beats.clock.advance(1)
        beats.beat.tick()
        assert seen() > before
        assert beats.beat.dispatcher._roster.next_at() - beats.clock.monotonic() == pytest.approx(40)
    finally:
        reader.close()


def anarchon_max_skew(told: Told) -> None:
    """The beat's clock is a quarter of an hour ahead, and slots still follow it."""
    assert told.minutes("plain", after=True) == [14]


def anarchon_early_tolerance(told: Told) -> None:
    """The store's clock has not come to the first slot yet, or is minutes before the last."""
    assert told.minutes("plain", after=False) == [0, 1, 2, 3, 4]
    assert told.minutes("plain", after=True) == [14]


def anarchon_batch(told: Told) -> None:
    assert max(map(len, told.beats.batches)) == 4


SEEN: dict[str, Callable[[Told], None]] = {option: globals()[option] for option in ROWS}


@pytest.fixture(scope="module")
def stories(servers: Servers) -> Iterator[Callable[[str], Told]]:
    told: dict[str, Told] = {}

    def tell(column: str) -> Told:
        if column not in told:
            told[column] = Told(column, servers)
        return told[column]

    yield tell
    for story in told.values():
        story.end()


def named(word: str) -> list[Any]:
    return [
        pytest.param(*cell, id=" / ".join(cell)) for cell, said in CELLS.items() if (said == "no") == (word == "no")
    ]


@pytest.mark.parametrize(("option", "column"), named("yes"))
def test_honoured(option: str, column: str, stories: Callable[[str], Told]) -> None:
    SEEN[option](stories(column))


@pytest.mark.parametrize(("option", "column"), named("no"))
def test_refused(option: str, column: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where it is written, if the store is known there; else when a beat starts."""
    backend = UNASKED[column]()
    store = column.partition(" ")[0]
    if option.startswith("anarchon_"):
        refuses_to_start(caplog, backend, f"'{option}'", store, **{option: 30})
        return
    app = Celery("refused", set_as_current=False)
    with pytest.raises(TypeError) as caught:
        Anarchon(app, backend=backend).every("export", 60, "task", **{option: JOBS[option][option]})
    assert isinstance(caught.value, OptionError)
    for word in (f"'{option}'", "job 'export'", store):
        assert word in str(caught.value)
    with pytest.raises(OptionError, match=f"'{option}'.*{store}"):
        Anarchon(Celery("defaults", set_as_current=False), backend=backend, **{option: JOBS[option][option]})
    entry = {"task": "task", "schedule": 60, "options": {"anarchon": {option: JOBS[option][option]}}}
    refuses_to_start(caplog, backend, f"'{option}'", store, "job 'export'", beat_schedule={"export": entry})
    refuses_to_start(
        caplog, backend, f"'anarchon_{option}'|'{option}'", store, **{f"anarchon_{option}": JOBS[option][option]}
    )


def refuses_to_start(caplog: pytest.LogCaptureFixture, backend: Any, *words: str, **settings: Any) -> None:
    app = Celery("refused", broker="memory://", set_as_current=False)
    app.conf.update(anarchon_backend=backend, **settings)
    caplog.clear()
    with caplog.at_level(logging.CRITICAL), pytest.raises(SystemExit):
        Scheduler(app=app)
    (said,) = [record.getMessage() for record in caplog.records]
    for word in words:
        assert any(one in said for one in word.split("|")), (word, said)
    app.close()


@pytest.mark.parametrize("column", COLUMNS)
def test_at_never_takes_overlap(column: str) -> None:
    with pytest.raises(OptionError, match=r"job 'launch': option 'overlap' is about the next slot"):
        Anarchon(Celery("once", set_as_current=False), backend=UNASKED[column]()).at(
            "launch", "2030-01-01T00:00Z", "task", overlap="skip"
        )


BOUNDED = dict.fromkeys(
    ("redis:idmp", "redis:script", "valkey:script", "rabbitmq queue", "rabbitmq stream", "nats"), 240
)
"""Seconds, with the store's defaults: four fifths of what it remembers. All others remember always."""


@pytest.mark.parametrize("column", COLUMNS)
def test_jitter_and_max_late_end_before_claims_are_forgotten(column: str) -> None:
    """Refused where the job is written, with the numbers."""
    anarchon = Anarchon(Celery("late", set_as_current=False), backend=UNASKED[column]())
    anarchon.every("within", "1h", "task", jitter=100, max_late=139)
    if column not in BOUNDED:
        anarchon.every("export", "1h", "task", jitter=100, max_late=140)
        return
    store = column.partition(" ")[0]
    text = rf"job 'export': options 'jitter' \+ 'max_late' \(240 s\).*{store}.*\({BOUNDED[column]} s\)"
    with pytest.raises(OptionError, match=text):
        anarchon.every("export", "1h", "task", jitter=100, max_late=140)


@pytest.mark.parametrize("column", ["redis:script", "valkey:script"])
def test_history_by_age_is_longer_than_the_window(column: str) -> None:
    anarchon = Anarchon(Celery("aged", set_as_current=False), backend=UNASKED[column]())
    with pytest.raises(OptionError, match=rf"job 'export': option 'history_ttl' \(300 s\).*{column}.*\(300 s\)"):
        anarchon.every("export", "1h", "task", history_ttl=300)
    anarchon.every("export", "1h", "task", history_ttl=301)


@pytest.mark.parametrize("column", COLUMNS)
def test_the_class_tells_type_checkers_what_the_traits_say(column: str) -> None:
    backend = UNASKED[column]()
    assert isinstance(backend, LeaseBackend) == honoured("overlap", column)
    assert isinstance(backend, LeaseBackend | AgedBackend) == honoured("history_ttl", column)


def test_every_option_is_a_row() -> None:
    rows = {row.removeprefix("anarchon_") for row in ROWS} - {"args", "kwargs"}
    assert rows | set(ELSEWHERE) == JOB_OPTIONS | OWN_SETTINGS - LATER_SETTINGS
    assert list(UNASKED) == COLUMNS
