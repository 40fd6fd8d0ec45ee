"""What is libSQL's own: URLs, a client of the app, a server that hangs, a stream that is left open."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import libsql as client_of_libsql
import pytest
from support.libsql_servers import Sqld, private_sqld

from celery_anarchon.backends import backend_from_url, libsql
from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, OutcomeUnknown
from celery_anarchon.model import Answer, Millis
from celery_anarchon.testing.contenders import in_child
from celery_anarchon.testing.harness import ask, claim, claim_all, raised_by

WON, TAKEN = Answer.WON, Answer.TAKEN


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sqld]:
    with private_sqld(tmp_path_factory.mktemp("sqld")) as running:
        yield running


@pytest.fixture
def opened(server: Sqld, namespace: str) -> Iterator[Callable[..., SqliteBackend]]:
    backends = []

    def make(database: Any = None) -> SqliteBackend:
        backend = SqliteBackend(database or server.url, namespace)
        backends.append(backend)
        backend.open("app")
        return backend

    yield make
    for backend in backends:
        backend.close()


def base(backend: SqliteBackend) -> Millis:
    return backend.now() // 3_600_000 * 3_600_000 - 3_600_000


def test_forms_of_urls(server: Sqld, namespace: str) -> None:
    with closing(backend_from_url(f"{server.url}?table={namespace}&busy_timeout=7s&auth_token=hidden")) as backend:
        assert (backend.name, backend.namespace, backend.busy_timeout) == ("libsql", namespace, 7)
        backend.open("app")
        assert "hidden" not in backend.describe()
    assert SqliteBackend("libsql://db.example.com", auth_token="x")._source._address == "https://db.example.com"
    assert SqliteBackend("http://127.0.0.1:8080").name == "libsql"
    for wrong, words in (("ws://host", "not spoken here"), ("libsql://host/db", "libsql://host:port")):
        with pytest.raises(ConfigurationError, match=words):
            SqliteBackend(wrong)
    with pytest.raises(ConfigurationError, match="auth_token"):
        SqliteBackend("a.db", auth_token="x")


def test_pyturso_is_refused_with_words() -> None:
    module = ModuleType("turso")
    exec("class Connection: pass", module.__dict__)
    with pytest.raises(ConfigurationError, match="pyturso, which locks its file"):
        SqliteBackend(module.Connection())


def test_a_client_of_the_app(server: Sqld, opened: Any) -> None:
    connection = client_of_libsql.connect(server.url.replace("libsql+", ""), auth_token="", isolation_level=None)
    backend, other = opened(connection), opened()
    assert backend.name == "libsql"
    slot = base(backend)
    assert claim_all(backend, [ask("a\0b", slot, "a"), ask("job", slot, "a")]) == [WON, WON]
    assert claim(other, "job", slot, "b") is TAKEN and claim(other, "job", slot + 1, "b") is WON
    assert claim(backend, "job", slot + 1, "a") is TAKEN
    connection.execute("BEGIN IMMEDIATE")
    error = raised_by(lambda: claim(backend, "job", slot + 2, "a"))
    assert isinstance(error, BackendUnavailable) and "inside a transaction" in str(error)
    connection.rollback()
    words = in_child(lambda: repr(raised_by(lambda: claim(backend, "job", slot + 2, "a"))))
    assert "fork" in words and "URL" in words
    backend.close()
    assert connection.execute("select 1").fetchone() == (1,)


def test_a_client_that_dies_inside_a_transaction_keeps_others_waiting_and_no_more(opened: Any) -> None:
    dead, other = opened(), opened()
    slot = base(other)
    held = False
    with suppress(BackendUnavailable, OutcomeUnknown), dead._writing() as connection:
        dead._floors(connection, ["job"])
        held = True
        # Its stream stays open. The server ends it after five seconds.
        answers = [raised_by(lambda: claim(other, "job", slot, "b")) for _ in range(3)]
        assert None in answers, answers
    assert held, "it had no transaction to die in"
    assert claim(other, "job", slot, "b") is WON
    assert claim(dead, "job", slot, "a") is TAKEN


def test_a_server_that_hangs_is_unavailable(server: Sqld, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libsql, "CALL_TIMEOUT", 0.5)
    backend = opened()
    slot = base(backend)
    backend.close()
    backend.open("app")
    process = server.process.pid
    # A child is that of the thread that made it.
    children = [
        child for task in Path(f"/proc/{process}/task").glob("*/children") for child in task.read_text().split()
    ]
    assert children
    for child in map(int, children):
        os.kill(child, signal.SIGSTOP)
    try:
        error = raised_by(lambda: claim(backend, "job", slot, "a"))
    finally:
        for child in map(int, children):
            os.kill(child, signal.SIGCONT)
    assert isinstance(error, BackendUnavailable) and "no answer" in str(error)
    for _ in range(200):
        with suppress(BackendUnavailable, OutcomeUnknown):
            assert claim(backend, "job", slot, "a") is WON
            return
        threading.Event().wait(0.05)
    pytest.fail("it never answered again")


def test_claims_survive_kill_9_of_the_server(server: Sqld, opened: Any) -> None:
    backend = opened()
    slot = base(backend)
    won = [slot + number for number in range(20) if claim(backend, "job", slot + number, "a") is WON]
    server.process.kill()
    server.process.start()
    server.wait_until_ready()
    assert set(claim_all(backend, [ask("job", at, "b") for at in won])) == {TAKEN} and len(won) == 20
