"""``anarchon status`` and ``history``: what the store says, and what is said when it does not answer."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_anarchon import MemoryBackend, SqliteBackend
from celery_anarchon.backends.base import Beat, ClaimRequest, Confirmation, Outcome
from celery_anarchon.errors import BackendUnavailable, OutcomeUnknown
from celery_anarchon.model import Millis, RunState
from celery_anarchon.wire import run_id, time_text

MINUTE = 60_000
RUN_KEYS = [
    *("job", "slot", "run_id", "state", "reason", "attempt", "manual", "claimed_at", "sent_at", "started_at"),
    *("ended_at", "late", "beat", "worker", "blocked_by"),
]


def entry(schedule: Any, **options: Any) -> dict[str, Any]:
    return {"task": "proj.work", "schedule": schedule, "options": {"anarchon": options}}


@pytest.fixture
def now() -> Millis:
    return time.time_ns() // 1_000_000 // MINUTE * MINUTE


@pytest.fixture
def store(app: Celery, tmp_path: Path) -> Iterator[SqliteBackend]:
    """The app's store, opened as a beat would."""
    path = tmp_path / "anarchon.db"
    app.conf.anarchon_backend = f"sqlite:///{path}"
    backend = SqliteBackend(path)
    backend.open("proj")
    yield backend
    backend.close()


def send(backend: Any, job: str, slot: Millis, late: Millis = 12) -> None:
    backend.claim([ClaimRequest(job=job, slot=slot, owner="me", beat="host:1", lease=30_000)])
    assert backend.confirm([Confirmation(job=job, slot=slot, owner="me", attempt=1, late=late)]) == [True]


# --- status -----------------------------------------------------------------------------------------------------------


def test_status(app: Celery, call: Callable[..., Any], store: SqliteBackend, now: Millis) -> None:
    app.conf.beat_schedule = {"report": entry(60), "never": entry(60)}
    send(store, "report", now - MINUTE)
    store.record([Outcome(job="report", slot=now, state=RunState.MISFIRE, reason="max-late")])
    seen = store.beat_seen(Beat(owner="abc", label="host:1", version="0.1.0", skew=-1_250))
    answer = call("status", "--json")
    assert (answer.code, answer.err) == (0, "")
    following = answer.json["jobs"][0]["next"]
    assert answer.json == {
        "backend": "sqlite",
        "namespace": "anarchon_runs",
        "beats": [{"label": "host:1", "owner": "abc", "version": "0.1.0", "skew": -1.25, "seen": time_text(seen)}],
        "workers": [],
        "jobs": [
            {"job": "report", "last": time_text(now - MINUTE), "next": following, "paused": False},
            {"job": "never", "last": None, "next": following, "paused": False},
        ],
    }
    assert following in (time_text(now + MINUTE), time_text(now + 2 * MINUTE))


def test_status_names_beats_whose_zone_data_differs(
    app: Celery, call: Callable[..., Any], store: SqliteBackend
) -> None:
    app.conf.beat_schedule = {"report": entry(60)}
    for number, zones in enumerate(("1 A=1 B=1", "1 A=1 B=2 C=3", "1 A=2 B=2", "2 A=9", "")):
        store.beat_seen(Beat(owner=f"o{number}", label=f"host:{number}", version="0.1.0", zones=zones))
    for words in (("status",), ("status", "--json")):
        answer = call(*words)
        assert answer.code == 1
        assert answer.err.splitlines() == [
            f"Error: beats {labels} have different zone data for {zone}: some slots may be sent twice; bring all hosts "
            "to one release and restart their beats, or set anarchon_packaged_tzdata"
            for zone, labels in (("A", "host:0 and host:1 and host:2"), ("B", "host:0 and host:1 and host:2"))
        ]
    assert len(answer.json["beats"]) == 5


def test_status_as_a_table(app: Celery, call: Callable[..., Any], store: SqliteBackend, now: Millis) -> None:
    app.conf.beat_schedule = {"report": entry(60), "[red]": entry(60)}
    send(store, "report", now)
    store.beat_seen(Beat(owner="abc", label="host:1", version="0.1.0"))
    answer = call("status")
    assert answer.code == 0
    for text in ("anarchon.db", "1 beat seen", "host:1", "+0.000 s", "2 jobs", "report", "[red]", time_text(now)):
        assert text in answer.out


def test_status_shows_no_beat_that_is_gone(
    app: Celery, call: Callable[..., Any], store: SqliteBackend, tmp_path: Path
) -> None:
    store.beat_seen(Beat(owner="dead", label="host:1", version="0.1.0"))
    store.beat_seen(Beat(owner="live", label="host:2", version="0.1.0"))
    with closing(sqlite3.connect(tmp_path / "anarchon.db", isolation_level=None)) as raw:
        raw.execute("update anarchon_runs_beats set seen = seen - 31000 where owner = 'dead'")
    assert [beat["owner"] for beat in call("status", "--json").json["beats"]] == ["live"]


def test_status_before_the_first_beat(app: Celery, call: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "anarchon.db"
    app.conf.anarchon_backend = f"sqlite:///{path}"
    app.conf.beat_schedule = {"report": entry(60)}
    answer = call("status", "--json")
    assert answer.code == 0
    assert answer.json["beats"] == [] and answer.json["jobs"][0]["last"] is None
    assert not path.exists(), "a reader makes no store"


def test_status_with_a_bad_entry(app: Celery, call: Callable[..., Any], store: SqliteBackend) -> None:
    app.conf.beat_schedule = {"good": entry(60), "bad": entry("soon")}
    answer = call("status", "--json")
    assert answer.code == 1
    assert [job["job"] for job in answer.json["jobs"]] == ["good"]
    assert "job 'bad'" in answer.err and "Traceback" not in answer.err


# --- history ----------------------------------------------------------------------------------------------------------


def test_history(app: Celery, call: Callable[..., Any], store: SqliteBackend, now: Millis) -> None:
    app.conf.beat_schedule = {"report": entry(60)}
    send(store, "report", now - MINUTE)
    store.record([Outcome(job="report", slot=now, state=RunState.SUPERSEDED, reason="newer-slot", beat="host:2")])
    answer = call("history", "report", "--json")
    assert answer.code == 0
    newest, older = answer.json
    assert list(newest) == RUN_KEYS
    assert (newest["slot"], newest["state"], newest["reason"]) == (time_text(now), "superseded", "newer-slot")
    assert newest["sent_at"] is None and newest["late"] is None
    assert older["run_id"] == run_id("anarchon_runs", "report", now - MINUTE)
    assert (older["job"], older["state"], older["attempt"], older["manual"]) == ("report", "dispatched", 1, False)
    assert (older["late"], older["beat"], older["worker"]) == (0.012, "host:1", None)
    assert older["claimed_at"].endswith("Z") and older["sent_at"].endswith("Z")
    assert call("history", "report", "--limit", "1", "--json").json == [newest]


def test_history_as_a_table(app: Celery, call: Callable[..., Any], store: SqliteBackend, now: Millis) -> None:
    send(store, "report", now)
    answer = call("history", "report")
    assert answer.code == 0
    for text in ("report", time_text(now), "dispatched", "0.012 s", "host:1"):
        assert text in answer.out


def test_history_of_a_job_that_is_gone(
    app: Celery, call: Callable[..., Any], store: SqliteBackend, now: Millis
) -> None:
    send(store, "removed", now)
    assert len(call("history", "removed", "--json").json) == 1


def test_history_of_a_job_that_has_none(app: Celery, call: Callable[..., Any], store: SqliteBackend) -> None:
    app.conf.beat_schedule = {"report": entry(60)}
    answer = call("history", "report", "--json")
    assert (answer.code, answer.json) == (0, [])


def test_history_of_an_unknown_job(app: Celery, call: Callable[..., Any], store: SqliteBackend) -> None:
    app.conf.beat_schedule = {"report": entry(60)}
    answer = call("history", "repotr", "--json")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == "Error: no job 'repotr' (did you mean 'report'?)\n"


@pytest.mark.parametrize("arguments", [[], ["report", "--limit", "0"]])
def test_usage(call: Callable[..., Any], store: SqliteBackend, arguments: list[str]) -> None:
    answer = call("history", *arguments)
    assert (answer.code, answer.out) == (2, "")


# --- the store --------------------------------------------------------------------------------------------------------


class Away(MemoryBackend):
    """A store that does not answer."""

    error: Exception = BackendUnavailable("redis://:***@db:6379/0: connection refused")

    def open(self, app_name: str, *, create: bool = True) -> None:
        raise self.error


@pytest.mark.parametrize("arguments", [["status"], ["status", "--json"], ["history", "report"]])
@pytest.mark.parametrize("error", [BackendUnavailable("refused"), OutcomeUnknown("the reply was lost")])
def test_the_store_cannot_be_reached(
    app: Celery, call: Callable[..., Any], arguments: list[str], error: Exception
) -> None:
    app.conf.anarchon_backend = backend = Away()
    backend.error = error
    answer = call(*arguments)
    assert (answer.code, answer.out) == (3, "")
    assert answer.err == f"Error: the store does not answer: {error}\n"


class AwayLater(MemoryBackend):
    closed = False

    def history(self, job: str, limit: int) -> Any:
        raise BackendUnavailable("gone")

    def close(self) -> None:
        self.closed = True


def test_the_store_goes_away_in_the_middle(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.anarchon_backend = backend = AwayLater()
    assert call("history", "report").code == 3
    assert backend.closed


def test_a_store_that_can_never_work(app: Celery, call: Callable[..., Any], tmp_path: Path) -> None:
    for url in ("sqlite:////no/such/folder/anarchon.db", f"sqlite:///{tmp_path}", "sqlitte:///x.db"):
        app.conf.anarchon_backend = url
        answer = call("status")
        assert (answer.code, answer.out) == (2, "")
        assert len(answer.err.splitlines()) == 1


def test_a_store_of_another_app(app: Celery, call: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "anarchon.db"
    other = SqliteBackend(path)
    other.open("another-app")
    other.close()
    app.conf.anarchon_backend = f"sqlite:///{path}"
    answer = call("status")
    assert answer.code == 2
    assert "another-app" in answer.err and len(answer.err.splitlines()) == 1
