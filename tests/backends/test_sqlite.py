"""SQLite's locks, and processes that share a file. The contract is in ``tests/conformance``."""

from __future__ import annotations

import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.creators import claim_for_ever, created_at_once, heard, started
from support.opened import opening
from support.sqlite_files import Opened, base, engine_on

from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.errors import BackendUnavailable
from celery_anarchon.model import Answer
from celery_anarchon.testing.contenders import in_child
from celery_anarchon.testing.harness import ask, claim, claim_all, confirm, raised_by


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "anarchon.db"


@pytest.fixture
def opened() -> Iterator[Opened]:
    with opening(SqliteBackend) as make:
        yield make


# --- waiting for other writers ----------------------------------------------------------------------------------------


@contextmanager
def writer(path: Path, seconds: float | None, mode: str = "IMMEDIATE") -> Iterator[None]:
    """Another client that holds the write lock, for so long or until the end of the block."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute(f"BEGIN {mode}")
            held.set()
            over.wait(seconds)
            connection.execute("ROLLBACK")

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_claims_wait_for_a_writer_of_three_seconds(journal: str, path: Path, opened: Any) -> None:
    """FC-24: "database is locked" is not an answer to a claim."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute(f"PRAGMA journal_mode={journal}").fetchone() == (journal,)
    with engine_on(path) as engine:
        # Longer than three slow threads of a busy machine need after the writer.
        clients = [opened(engine if journal == "delete" else path, busy_timeout=60) for _ in range(3)]
        slot = base(clients[0])
        answers: dict[int, list[Answer]] = {}

        def contend(number: int) -> None:
            requests = [ask(f"job {job}", slot, f"owner {number}") for job in range(50)]
            answers[number] = claim_all(clients[number], requests)

        threads = [threading.Thread(target=contend, args=(number,)) for number in range(3)]
        began = time.monotonic()
        with writer(path, 3, "EXCLUSIVE"):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert time.monotonic() - began > 2.5
        winners = [answer for row in answers.values() for answer in row if answer is Answer.WON]
        assert len(answers) == 3 and len(winners) == 50
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == (journal,)


def test_a_lock_held_past_the_timeout_fails_closed(path: Path, opened: Any) -> None:
    backend = opened(path, busy_timeout=0.3)
    slot = base(backend)
    with writer(path, None):
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(BackendUnavailable, match="busy_timeout"):
                claim(backend, "job", slot, "a")
        # The driver's own patience would be 5 s, each time.
        assert 0.5 < time.monotonic() - began < 2 * 5
        assert backend.history("job", 10) == [], "readers need not wait, and nothing was applied"
    assert claim(backend, "job", slot, "a") is Answer.WON


def test_a_reader_that_keeps_a_commit_waiting(path: Path, opened: Any) -> None:
    """Without a WAL a reader can hold up the COMMIT itself. It is tried again, and undone when the time is over."""
    with engine_on(path, connect_args={"timeout": 0.05}) as engine:
        backend = opened(engine, busy_timeout=0.4)
        slot = base(backend)
        assert claim_all(backend, [ask("job", slot + number, "a") for number in range(3)]) == [Answer.WON] * 3
        with closing(sqlite3.connect(path, isolation_level=None)) as reader:
            rows = reader.execute("SELECT * FROM anarchon_runs")
            rows.fetchone()
            with pytest.raises(BackendUnavailable, match="locked"):
                claim(backend, "job", slot + 3, "a")
            rows.fetchall()
        assert len(backend.history("job", 10)) == 3
        assert claim(backend, "job", slot + 3, "b") is Answer.WON


def test_a_signal_is_handled_during_the_wait(path: Path, opened: Any) -> None:
    """A beat that waits for the store must still be stopped within a second."""
    backend = opened(path, busy_timeout=20)
    slot = base(backend)

    def stop(*_: Any) -> None:
        raise SystemExit(1)

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with writer(path, None):
            began = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(SystemExit):
                claim(backend, "job", slot, "a")
            assert time.monotonic() - began < backend.busy_timeout
    finally:
        signal.signal(signal.SIGALRM, before)
    assert claim(backend, "job", slot, "a") is Answer.WON


def test_close_comes_as_a_signal_again_and_again(path: Path, opened: Any) -> None:
    """X3 with a real signal, at whatever place it strikes."""
    backend = opened(path)
    slot = base(backend)
    strikes: list[int] = []

    def strike(*_: Any) -> None:
        strikes.append(1)
        backend.close()

    before = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        for number in range(100):
            assert claim(backend, "job", slot + number, "a") is Answer.WON
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(strikes) > 10
    other = opened(path)
    assert set(claim_all(other, [ask("job", slot + number, "b") for number in range(100)])) == {Answer.TAKEN}


def test_threads_share_a_backend(path: Path, opened: Any) -> None:
    backend = opened(path)
    slot = base(backend)
    won: list[Answer] = []

    def work(number: int) -> None:
        for step in range(30):
            won.append(claim(backend, f"job {number}", slot + step, "a"))
            assert confirm(backend, f"job {number}", slot + step, "a")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [Answer.WON] * 180


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.race
def test_eight_processes_make_the_tables_at_once(tmp_path: Path) -> None:
    for attempt in range(6):
        assert created_at_once(f"sqlite:///{tmp_path}/{attempt}.db") == ["taken"] * 7 + ["won"]


def test_what_was_won_survives_kill_9(path: Path, opened: Any) -> None:
    process, said = started(claim_for_ever, path)
    won = [heard(said) for _ in range(100)]
    process.kill()
    process.join()
    process.close()
    with suppress(EOFError), said:
        while True:
            won.append(heard(said))
    backend = opened(path)
    answers = claim_all(backend, [ask("job", slot, "b") for slot in won])
    assert set(answers) == {Answer.TAKEN} and len(won) >= 100
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_fork_gets_connections_of_its_own(path: Path, opened: Any) -> None:
    with engine_on(path) as engine:
        for number, database in enumerate((path, engine)):
            backend = opened(database, table=f"runs{number}")
            slot = base(backend)
            claim(backend, "job", slot, "parent")
            child = [ask("job", slot, "child"), ask("job", slot + 1, "child")]
            assert in_child(lambda: claim_all(backend, child)) == [Answer.TAKEN, Answer.WON]  # noqa: B023
            assert claim(backend, "job", slot + 1, "parent") is Answer.TAKEN


def test_a_connection_does_not_cross_a_fork(path: Path, opened: Any) -> None:
    with closing(sqlite3.connect(path)) as connection:
        backend = opened(connection)
        slot = base(backend)
        error = in_child(lambda: repr(raised_by(lambda: claim(backend, "job", slot, "a"))))
        assert "fork" in error and "hand over a path" in error
        assert claim(backend, "job", slot, "a") is Answer.WON
