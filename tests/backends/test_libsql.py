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
from support.opened import opening

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
    with opening(lambda database=server.url: SqliteBackend(database, namespace)) as make:
        yield make


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
    answers: list[BaseException | None] = []

    def freeze() -> None:
        with dead._writing() as connection:
            dead._floors(connection, ["job"])
            # Its stream stays open. The server ends it after five seconds.
            answers.extend(raised_by(lambda: claim(other, "job", slot, "b")) for _ in range(3))

    # It lives after all, and hears that nothing of its own stands.
    error = raised_by(freeze)
    assert isinstance(error, BackendUnavailable) and "timed out" in str(error)
    assert None in answers, answers
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


def test_a_server_that_hangs_within_a_transaction_is_waited_for_once(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened()
    asked: list[bytes] = []

    def hang(_: Any, body: bytes, **__: Any) -> Any:
        asked.append(body)
        raise TimeoutError("timed out")

    def write() -> None:
        with backend._writing() as connection:
            monkeypatch.setattr(libsql.HranaConnection, "_post", hang)
            backend._floors(connection, ["job"])

    error = raised_by(write)
    assert isinstance(error, BackendUnavailable) and "no answer" in str(error)
    assert len(asked) == 1


def test_a_commit_without_an_answer_is_of_unknown_outcome(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, other = opened(), opened()
    slot = base(backend)
    post = libsql.HranaConnection._post

    def lose(link: Any, body: bytes, **more: Any) -> Any:
        answer = post(link, body, **more)
        if b"COMMIT" in body:
            raise TimeoutError("timed out")
        return answer

    monkeypatch.setattr(libsql.HranaConnection, "_post", lose)
    with pytest.raises(OutcomeUnknown, match="no answer"):
        claim(backend, "job", slot, "a")
    monkeypatch.undo()
    assert claim(other, "job", slot, "b") is TAKEN and claim(backend, "job", slot, "a") is WON


def test_claims_survive_kill_9_of_the_server(server: Sqld, opened: Any) -> None:
    backend = opened()
    slot = base(backend)
    won = [slot + number for number in range(20) if claim(backend, "job", slot + number, "a") is WON]
    server.process.kill()
    server.process.start()
    server.wait_until_ready()
    assert set(claim_all(backend, [ask("job", at, "b") for at in won])) == {TAKEN} and len(won) == 20
