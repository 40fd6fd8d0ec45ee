"""Connections and engines that the app hands over to SQLite's backend."""

from __future__ import annotations

import logging
import queue
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.pool import StaticPool
from support.opened import opening
from support.sqlite_files import Opened, base, engine_on, refusal

from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.errors import BackendUnavailable, ConfigurationError
from celery_anarchon.model import Answer
from celery_anarchon.testing.harness import claim, confirm, raised_by


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "anarchon.db"


@pytest.fixture
def opened() -> Iterator[Opened]:
    with opening(SqliteBackend) as make:
        yield make


# --- connections and engines of the app -------------------------------------------------------------------------------


def test_a_connection_keeps_its_settings_and_stays_open(path: Path, opened: Any) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        connection.text_factory = bytes
        connection.create_function("regexp", 2, lambda pattern, value: 42)
        kept = connection.isolation_level, connection.row_factory, connection.text_factory
        backend = opened(connection)
        slot = base(backend)
        assert claim(backend, "job", slot, "a") is Answer.WON
        assert [run.job for run in backend.history("job", 1)] == ["job"]
        backend.close()
        backend.close()
        assert (connection.isolation_level, connection.row_factory, connection.text_factory) == kept
        assert connection.execute("SELECT 'a' REGEXP 'b'").fetchone()[0] == 42, "the app's own function was replaced"
        assert connection.execute("SELECT owner FROM anarchon_runs").fetchone()["owner"] == b"a"
        assert not connection.in_transaction


def test_a_connection_inside_a_transaction_is_refused(path: Path, opened: Any) -> None:
    """A claim inside it would be undone by the app's rollback, and the slot won again by another."""
    with closing(sqlite3.connect(path)) as connection:
        backend = opened(connection)
        slot = base(backend)
        connection.execute("CREATE TABLE theirs (number)")
        connection.execute("INSERT INTO theirs VALUES (1)")
        for call in (lambda: claim(backend, "job", slot, "a"), lambda: backend.history("job", 1)):
            with pytest.raises(BackendUnavailable, match=r"inside a transaction.*commit or roll back"):
                call()
        assert connection.in_transaction
        connection.commit()
        assert connection.execute("SELECT number FROM theirs").fetchall() == [(1,)]
        assert claim(backend, "job", slot, "a") is Answer.WON


if sys.version_info >= (3, 12):

    def test_a_connection_without_autocommit_is_refused(path: Path) -> None:
        with (
            closing(sqlite3.connect(path, autocommit=False)) as connection,
            pytest.raises(BackendUnavailable, match="autocommit=False"),
        ):
            SqliteBackend(connection).open("app")
        with closing(sqlite3.connect(path, autocommit=True)) as connection:
            backend = SqliteBackend(connection)
            backend.open("app")
            assert claim(backend, "job", base(backend), "a") is Answer.WON


def test_a_connection_of_another_thread_is_refused(path: Path) -> None:
    made: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
    over = threading.Event()

    def own() -> None:
        with closing(sqlite3.connect(path)) as connection:
            made.put(connection)
            over.wait()

    thread = threading.Thread(target=own)
    thread.start()
    try:
        assert "check_same_thread=False" in refusal(SqliteBackend(made.get()))
    finally:
        over.set()
        thread.join()
    with closing(sqlite3.connect(path, check_same_thread=False)) as connection:
        backend = SqliteBackend(connection)
        errors: list[BaseException | None] = []
        thread = threading.Thread(target=lambda: errors.append(raised_by(lambda: backend.open("app"))))
        thread.start()
        thread.join()
        assert errors == [None]


def test_a_closed_connection_is_unavailable(path: Path, opened: Any) -> None:
    connection = sqlite3.connect(path)
    backend = opened(connection)
    connection.close()
    with pytest.raises(BackendUnavailable, match="closed"):
        claim(backend, "job", 1, "a")


def test_an_engine_is_used_and_never_disposed(path: Path, opened: Any) -> None:
    with engine_on(path) as engine:
        pool = engine.pool
        backend = opened(engine)
        slot = base(backend)
        assert claim(backend, "job", slot, "a") is Answer.WON
        backend.close()
        assert engine.pool is pool
        with engine.connect() as connection:
            assert connection.connection.dbapi_connection.isolation_level == ""
            assert connection.execute(text("SELECT count(*) FROM anarchon_runs")).scalar_one() == 1
        assert claim(opened(path), "job", slot, "b") is Answer.TAKEN


@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE"])
def test_an_engine_that_begins_by_itself(begin: str, path: Path, opened: Any) -> None:
    """SQLAlchemy's own recipe for transactions on SQLite."""
    with engine_on(path) as engine:

        @event.listens_for(engine, "connect")
        def on_connect(connection: Any, _: Any) -> None:
            connection.isolation_level = None

        @event.listens_for(engine, "begin")
        def on_begin(connection: Any) -> None:
            connection.exec_driver_sql(begin)

        backend = opened(engine)
        slot = base(backend)
        assert claim(backend, "job", slot, "a") is Answer.WON
        assert confirm(backend, "job", slot, "a")
        assert claim(opened(path), "job", slot, "b") is Answer.TAKEN


def test_an_engine_in_memory_serves_one_process(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    with caplog.at_level(logging.WARNING, "celery_anarchon.backend"):
        backend = opened(engine)
    assert "in memory" in caplog.text
    slot = base(backend)
    assert claim(backend, "job", slot, "a") is Answer.WON
    with engine.connect() as connection:
        connection.execute(text("CREATE TABLE theirs (number)"))
        connection.execute(text("INSERT INTO theirs VALUES (1)"))
        with pytest.raises(BackendUnavailable, match="inside a transaction"):
            claim(backend, "job", slot, "a")
        connection.commit()
        assert connection.execute(text("SELECT count(*) FROM theirs")).scalar_one() == 1, "it was rolled back"
    assert claim(backend, "job", slot, "a") is Answer.WON
    engine.dispose()


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    for wrong, words in (
        (":memory:", "MemoryBackend"),
        ("", "path"),
        ("file:x.db?mode=memory", "path"),
        ("sqlite:///x.db", "backend_from_url"),
        (b"x.db", "bytes"),
        (None, "NoneType"),
        (7, "int"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            SqliteBackend(wrong)
