"""PostgreSQL with several threads of one process: on one connection of the app, and in each other's way."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.pool import StaticPool
from support.opened import claimed_by_threads, opening
from support.postgres_servers import Postgres, private_postgres
from support.waiting import wait_for

from celery_anarchon import PostgresBackend
from celery_anarchon.model import Answer
from celery_anarchon.testing.contenders import at_once
from celery_anarchon.testing.harness import ask, claim, claim_all, raised_by


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    with private_postgres(tmp_path_factory.mktemp("postgres")) as running:
        yield running


@pytest.fixture
def opened(server: Postgres, namespace: str) -> Iterator[Callable[..., PostgresBackend]]:
    """Make a backend of this test's tables."""
    with opening(lambda connection=server.url: PostgresBackend(connection, namespace)) as make:
        yield make


class Watched:
    """A lock that says when somebody wants it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.wanted = threading.Event()

    def __enter__(self) -> None:
        if self._lock.locked():
            self.wanted.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_thread_that_waits_for_the_connection_takes_no_reply_of_another(server: Postgres, opened: Any) -> None:
    """It looks whether the server has hung up, and that takes in what has come: whoever asked would wait for ever."""
    with psycopg.connect(server.url) as connection:
        backend = opened(connection)
        slot = backend.now() - 60_000
        source: Any = backend._source
        source._lock = lock = Watched()
        answers: list[Answer] = []
        other = threading.Thread(target=lambda: answers.append(claim(backend, "job", slot, "a")))
        with source.connection():
            link = connection.pgconn
            link.send_query(b"select 1")
            select.select([link.socket], [], [])
            other.start()
            assert lock.wanted.wait(60)
            assert select.select([link.socket], [], [], 0)[0], "somebody has taken the reply"
            while link.is_busy():
                link.consume_input()
            while link.get_result() is not None:
                pass
        other.join()
        assert answers == [Answer.WON]


def test_threads_that_share_the_one_connection_of_an_engine(server: Postgres, opened: Any) -> None:
    engine = create_engine(server.url.replace("postgresql:", "postgresql+psycopg:"), poolclass=StaticPool)
    try:
        claimed_by_threads(opened(engine))
    finally:
        engine.dispose()


def test_threads_that_find_the_connection_broken_share_what_replaces_it(server: Postgres, opened: Any) -> None:
    """What only one of them knew, nobody would close."""
    with psycopg.connect(server.url) as connection:
        backend = opened(connection)
        slot = backend.now() - 60_000
        source: Any = backend._source
        like, made = source._like, []

        def making() -> Any:
            own = like()
            made.append(own)
            if len(made) == 1:
                # Another thread finds the same, and is done before this one has what it needs.
                at_once([lambda: claim(backend, "job", slot, "a")])
            return own

        source._like = making
        server.run(f"select pg_terminate_backend({connection.info.backend_pid}, 9000)")
        assert claim(backend, "job", slot, "b") is Answer.TAKEN
        backend.close()
        assert not any(own._connections._idle for own in made)


def test_rows_of_jobs_are_made_while_no_other_is_locked(server: Postgres, namespace: str, opened: Any) -> None:
    """A transaction that was undone took its rows along. Whoever makes them anew while it holds others waits for
    somebody who waits for it."""
    backend = opened()
    slot = backend.now() - 60_000
    assert claim(backend, "c", slot, "a") is Answer.WON

    def undone() -> None:
        with backend._writing() as connection:
            backend._floors(connection, ["b"])
            raise LookupError

    assert isinstance(raised_by(undone), LookupError)
    answers: list[Answer] = []
    other = threading.Thread(target=lambda: answers.extend(claim_all(backend, [ask(n, slot, "b") for n in "bc"])))
    with server.client() as client, server.client() as watcher:
        with client.transaction():
            client.execute(f"insert into {namespace}_jobs (job) values ('b')")
            other.start()
            waiting = "select count(*) from pg_locks where not granted"
            wait_for(lambda: watcher.execute(waiting).fetchone() == (1,), "a claim that waits for the row")
            client.execute(f"select from {namespace}_jobs where job = 'c' for update nowait")
        other.join()
    assert answers == [Answer.WON, Answer.TAKEN]
