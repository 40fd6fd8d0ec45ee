"""What a call costs SQLite, and what it keeps."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.opened import opening
from support.sqlite_files import Opened, base
from support.statements import statements_of, steps_of

from celery_anarchon.backends.base import Beat, ClaimRequest, Confirmation, GivenUp, Hold, Keep, Sighting, Takeover
from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.model import Answer, RunState
from celery_anarchon.testing.harness import ask, claim, claim_all, confirm


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "anarchon.db"


@pytest.fixture
def opened() -> Iterator[Opened]:
    with opening(SqliteBackend) as make:
        yield make


# --- what it costs ----------------------------------------------------------------------------------------------------


def statements(backend: SqliteBackend, call: Callable[[], Any]) -> list[str]:
    with statements_of(backend) as seen:
        call()
    return [statement for statement, _ in seen]


def test_the_number_of_statements_does_not_grow_with_the_batch(path: Path, opened: Any) -> None:
    backend = opened(path)
    first = base(backend)

    def requests(count: int, owner: str, offset: int) -> list[ClaimRequest]:
        return [ask(f"job {number}", first + offset, owner) for number in range(count)]

    counts: dict[str, set[int]] = {}
    for offset, count in enumerate((1, 10, 1_000)):
        holds = [
            Hold(job=request.job, slot=request.slot, owner="a", attempt=1) for request in requests(count, "a", offset)
        ]
        half = max(1, count // 2)
        for name, call in (
            ("won", lambda: backend.claim(requests(count, "a", offset))),  # noqa: B023
            ("won again", lambda: backend.claim(requests(count, "a", offset))),  # noqa: B023
            ("taken", lambda: backend.claim(requests(count, "b", offset))),  # noqa: B023
            ("confirm", lambda: backend.confirm([Confirmation(**vars(h), late=1) for h in holds[:half]])),  # noqa: B023
            ("confirm again", lambda: backend.confirm([Confirmation(**vars(h), late=1) for h in holds[:half]])),  # noqa: B023
            ("abandon", lambda: backend.abandon(holds[half:] or holds)),  # noqa: B023
            (
                "takeover",
                lambda: backend.takeover(
                    [
                        Takeover(job=h.job, slot=h.slot, from_attempt=1, owner="c", beat="", lease=1)
                        for h in holds  # noqa: B023
                    ]
                ),
            ),
            ("give up", lambda: backend.give_up([GivenUp(**vars(h), state=RunState.NOT_SENT) for h in holds])),  # noqa: B023
            ("register", lambda: backend.register([Sighting(job=h.job, fingerprint=str(offset)) for h in holds])),  # noqa: B023
            (
                "tidy",
                lambda: backend.tidy([Keep(job=h.job, decided=first + 99, history_size=99) for h in holds]),  # noqa: B023
            ),
        ):
            counts.setdefault(name, set()).add(len(statements(backend, call)))
    assert {name: spread for name, spread in counts.items() if len(spread) > 1} == {}
    assert max(counts["won"]) <= 5 and max(counts["taken"]) <= 7, counts


def test_a_statement_is_rendered_once_for_each_number_of_rows(path: Path, opened: Any) -> None:
    """For a large batch the text of its rows costs as much as the batch."""
    backend = opened(path)
    slot = base(backend)

    def texts(count: int, offset: int) -> list[str]:
        requests = [ask(f"job {number}", slot + offset, "a") for number in range(count)]
        return [text for text in statements(backend, lambda: backend.claim(requests)) if "VALUES" in text]

    first, second, third = texts(40, 0), texts(40, 1), texts(41, 2)
    assert len(first) >= 2
    assert all(one is other for one, other in zip(first, second, strict=True))
    assert not set(first) & set(third)


def test_a_batch_of_ten_thousand(path: Path, opened: Any) -> None:
    """More rows than one statement can have parameters for."""
    backend = opened(path)
    slot = base(backend)
    everything = [ask(f"job {number}", slot, "a") for number in range(10_000)]
    assert set(claim_all(backend, everything)) == {Answer.WON}
    assert set(claim_all(backend, [ask(r.job, r.slot, "b") for r in everything])) == {Answer.TAKEN}
    confirmations = [Confirmation(job=r.job, slot=r.slot, owner="a", attempt=1, late=0) for r in everything]
    assert all(backend.confirm(confirmations))
    registrations = backend.register([Sighting(job=r.job, fingerprint="x") for r in everything])
    assert {registration.last for registration in registrations} == {slot}


def test_every_statement_finds_its_rows_by_an_index(path: Path, opened: Any) -> None:
    """SQLite walks the whole table for (job, slot) IN (VALUES ...), and for a partial index that it cannot prove."""
    backend = opened(path)
    first = base(backend)
    held = [ask("job", first + number, "a") for number in range(3)]
    with statements_of(backend) as seen:
        backend.claim(held)
        backend.claim(held)
        backend.claim([ask("job", first, "b")])
        confirm(backend, "job", first, "a")
        confirm(backend, "job", first, "b")
        backend.abandon([Hold(job="job", slot=first + 1, owner="a", attempt=1)])
        backend.lapsed(10)
        backend.takeover([Takeover(job="job", slot=first + 1, from_attempt=1, owner="b", beat="", lease=1)])
        backend.give_up([GivenUp(job="job", slot=first + 1, owner="b", attempt=1, state=RunState.MISFIRE)])
        backend.register([Sighting(job="job", fingerprint=str(number)) for number in range(10)])
        backend.history("job", 5)
        backend.last_run("job")
        backend.tidy([Keep(job="job", decided=first, history_size=0, history_ttl=1)])
    plans: dict[str, list[str]] = {}
    with closing(sqlite3.connect(path)) as connection:
        for statement, parameters in seen:
            if "anarchon_runs" in statement:
                rows = connection.execute("EXPLAIN QUERY PLAN " + statement, parameters).fetchall()
                plans[statement] = [row[3] for row in rows]
    assert len(plans) >= 15
    walks = {
        statement: plan
        for statement, plan in plans.items()
        if any(re.match(r"SCAN (anarchon|inner|outer)", step) for step in plan)
    }
    assert walks == {}
    (lapsed,) = [plan for statement, plan in plans.items() if "patience <= ?" in statement and "LIMIT" in statement]
    assert any("USING INDEX anarchon_runs_lease" in step for step in lapsed), lapsed


def test_the_look_for_lapsed_claims_does_not_grow_with_the_past(path: Path, opened: Any) -> None:
    backend = opened(path)
    first = base(backend)
    claim(backend, "dead", first, "a", lease=0)
    assert len(backend.lapsed(10)) == 1
    few = steps_of(backend, lambda: backend.lapsed(10), each=10)
    requests = [ask(f"job {number}", first, "a") for number in range(5_000)]
    claim_all(backend, requests)
    backend.confirm([Confirmation(job=r.job, slot=r.slot, owner="a", attempt=1, late=0) for r in requests[1_000:]])
    assert steps_of(backend, lambda: backend.lapsed(10), each=10) <= few + 5


def test_beats_that_vanished_are_forgotten_in_time(path: Path, opened: Any) -> None:
    backend = opened(path)
    backend.beat_seen(Beat(owner="gone", label="gone", version="1"))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE anarchon_runs_beats SET seen = seen - 90000000")
        connection.commit()
    assert len(backend.beats(within=100_000_000)) == 1
    backend.beat_seen(Beat(owner="here", label="here", version="1"))
    assert [beat.owner for beat in backend.beats(within=100_000_000)] == ["here"]


def test_claims_in_a_file_of_ours_survive_a_power_cut(path: Path, opened: Any) -> None:
    backend = opened(path)
    (connection,) = backend._source._connections._idle
    assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2
    assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"


def test_the_clock_is_that_of_the_machine(path: Path, opened: Any) -> None:
    backend = opened(path)
    for _ in range(50):
        before = time.time_ns() // 1_000_000
        assert before - 1 <= backend.now() <= time.time_ns() // 1_000_000 + 1
