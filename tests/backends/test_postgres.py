"""What is PostgreSQL's own: roles and defaults, what the app hands over, a server that goes, hangs or is killed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any

import psycopg
import psycopg_pool
import pytest
from psycopg.rows import dict_row
from sqlalchemy import create_engine, event
from support.creators import created_at_once
from support.opened import opening
from support.postgres_servers import Postgres, private_postgres

from celery_anarchon import PostgresBackend
from celery_anarchon.backends import backend_from_url, pgconnections, postgres
from celery_anarchon.backends.base import Keep, Takeover
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, OutcomeUnknown
from celery_anarchon.model import Answer, Millis
from celery_anarchon.testing.contenders import at_once
from celery_anarchon.testing.harness import ask, claim, claim_all, confirm, raised_by

WON, TAKEN = Answer.WON, Answer.TAKEN


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    with private_postgres(tmp_path_factory.mktemp("postgres")) as running:
        yield running


@pytest.fixture
def opened(server: Postgres, namespace: str) -> Iterator[Callable[..., PostgresBackend]]:
    """Make a backend of this test's tables."""
    with opening(lambda connection=server.url, table=namespace: PostgresBackend(connection, table)) as make:
        yield make


def base(backend: PostgresBackend) -> Millis:
    return backend.now() // 3_600_000 * 3_600_000 - 3_600_000


@contextmanager
def quiet_log(server: Postgres) -> Iterator[None]:
    """The server has nothing to complain of meanwhile."""
    before = len(server.log())
    yield
    lines = server.log()[before:].splitlines()
    assert [line for line in lines if any(word in line for word in ("ERROR", "FATAL", "WARNING", "PANIC"))] == []


def crowd(size: int, deed: Callable[[int], Any]) -> list[Any]:
    """What *deed* returns in each of *size* threads that begin together."""
    return at_once([partial(deed, number) for number in range(size)], patience=120)


# --- tables and roles -------------------------------------------------------------------------------------------------


@pytest.mark.race
def test_eight_processes_make_schema_and_tables_at_once(server: Postgres, namespace: str) -> None:
    with quiet_log(server):
        for attempt in range(4):
            url = f"{server.url}?table=s{attempt}_{namespace}.runs"
            assert created_at_once(url) == ["taken"] * 7 + ["won"]


@pytest.fixture
def role(server: Postgres, namespace: str) -> Iterator[str]:
    """The URL of a role that may connect, and nothing else."""
    name = f"r{namespace}"
    server.run(f"create role {name} login")
    yield server.at(server.port, user=name)
    server.run(f"drop owned by {name}", f"drop role {name}")


def test_a_role_that_may_not_create_works_on_tables_that_are_there(
    server: Postgres, namespace: str, role: str, opened: Any
) -> None:
    schema = f"plan_{namespace}"
    table, name = f"{schema}.runs", f"r{namespace}"
    error = raised_by(lambda: opened(role, table))
    assert isinstance(error, ConfigurationError) and "create-tables --sql" in str(error)
    server.run(*PostgresBackend(server.url, table).ddl())
    error = raised_by(lambda: opened(role, table))
    assert isinstance(error, ConfigurationError) and "grant" in str(error)
    # As docs/postgresql.md has it.
    server.run(
        f"grant usage on schema {schema} to {name}",
        f"grant select, insert, update, delete on all tables in schema {schema} to {name}",
    )
    with quiet_log(server):
        backend = opened(role, table)
        slot = base(backend)
        assert claim(backend, "job", slot, "a") is WON
        assert confirm(backend, "job", slot, "a")
        assert claim(opened(role, table), "job", slot, "b") is TAKEN
        backend.tidy([Keep(job="job", decided=slot + 1, history_size=0)])
        assert claim(backend, "job", slot, "b") is Answer.TOO_OLD


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_the_default_of_the_role_does_not_matter(server: Postgres, level: str, opened: Any, role: str) -> None:
    name = psycopg.conninfo.conninfo_to_dict(role)["user"]
    server.run(
        f"alter role {name} set default_transaction_isolation = '{level}'",
        f"alter role {name} set default_transaction_deferrable = on",
        f"alter role {name} set synchronous_commit = off",
        f"grant create on schema public to {name}",
    )
    backends = [opened(role) for _ in range(6)]
    slot = base(backends[0])
    with quiet_log(server):
        for round_ in range(15):
            answers = crowd(6, lambda number, at=slot + round_: claim(backends[number], "job", at, str(number)))
            assert answers.count(WON) == 1 and answers.count(TAKEN) == 5
    with backends[0]._writing() as connection:
        assert connection.exec_driver_sql("show synchronous_commit").scalar_one() == "on"
        assert connection.exec_driver_sql("show transaction_isolation").scalar_one() == "read committed"


def test_a_read_only_server_is_refused_with_words(server: Postgres, role: str, opened: Any) -> None:
    name = psycopg.conninfo.conninfo_to_dict(role)["user"]
    server.run(f"grant create on schema public to {name}")
    opened(role)
    server.run(f"alter role {name} set default_transaction_read_only = on")
    backend = opened(role)
    error = raised_by(lambda: claim(backend, "job", base(backend), "a"))
    assert isinstance(error, BackendUnavailable) and "target_session_attrs=read-write" in str(error)


def test_an_encoding_that_cannot_store_every_name_is_refused(server: Postgres) -> None:
    server.run("create database latin encoding 'LATIN1' locale 'C' template template0")
    backend = PostgresBackend(server.at(server.port, "latin"))
    with closing(backend), pytest.raises(ConfigurationError, match="LATIN1"):
        backend.open("app")


def test_a_table_of_somebody_else_is_left_alone(server: Postgres, namespace: str, opened: Any) -> None:
    server.run(f"create table {namespace} (id int)")
    with pytest.raises(ConfigurationError, match="not of this namespace"):
        opened()
    server.run(f"drop table {namespace}")


@pytest.mark.parametrize("table", ["a.b.c", "a b", "", ".x", "x.", "a-b", "x" * 57, "runs_meta", None])
def test_a_table_needs_a_plain_name(table: Any) -> None:
    with pytest.raises(ConfigurationError, match="table="):
        PostgresBackend("", table)


def test_a_keyword_is_a_name(server: Postgres, opened: Any) -> None:
    backend = opened(table="Order")
    assert claim(backend, "job", base(backend), "a") is WON


def test_two_schemas_are_two_stores(opened: Any, namespace: str) -> None:
    one, two = opened(table=f"a_{namespace}.runs"), opened(table=f"b_{namespace}.runs")
    slot = base(one)
    assert claim(one, "job", slot, "a") is WON and claim(two, "job", slot, "a") is WON


def test_a_reader_makes_nothing(server: Postgres, namespace: str) -> None:
    backend = PostgresBackend(server.url, f"not_{namespace}.runs")
    backend.open("app", create=False)
    assert backend.history("job", 10) == [] and backend.now() > 0 and backend.beats(1000) == []
    backend.close()
    with server.client() as client:
        assert client.execute("select to_regnamespace(%s)", (f"not_{namespace}",)).fetchone() == (None,)


def test_names_as_they_are_stored(server: Postgres, namespace: str, opened: Any) -> None:
    backend = opened()
    slot = base(backend)
    names = {"a\0b": "a\\0b", "a\\0b": "a\\\\0b", "plain é": "plain é"}
    assert claim_all(backend, [ask(name, slot, "a") for name in names]) == [WON] * 3
    with server.client() as client:
        assert {job for (job,) in client.execute(f"select job from {namespace}")} == set(names.values())
    for name in names:
        assert [run.job for run in backend.history(name, 1)] == [name]


# --- what the app hands over ------------------------------------------------------------------------------------------


def test_a_connection_keeps_its_settings_and_stays_open(server: Postgres, opened: Any) -> None:
    with psycopg.connect(server.url, row_factory=dict_row, prepare_threshold=3) as connection:
        backend = opened(connection)
        assert claim(backend, "job", base(backend), "a") is WON
        backend.close()
        assert (connection.autocommit, connection.row_factory, connection.prepare_threshold) == (False, dict_row, 3)
        assert connection.execute("select 1 as one").fetchone() == {"one": 1}


@pytest.mark.parametrize("autocommit", [False, True])
def test_a_connection_inside_a_transaction_is_refused(server: Postgres, autocommit: bool, opened: Any) -> None:
    with psycopg.connect(server.url, autocommit=autocommit) as connection:
        backend = opened(connection)
        slot = base(backend)
        connection.execute("begin" if autocommit else "select 1")
        error = raised_by(lambda: claim(backend, "job", slot, "a"))
        assert isinstance(error, BackendUnavailable) and "inside a transaction" in str(error)
        connection.rollback()
        assert claim(backend, "job", slot, "a") is WON
        with connection.pipeline():
            error = raised_by(lambda: claim(backend, "job", slot, "a"))
        assert isinstance(error, BackendUnavailable) and "middle of another call" in str(error)


def test_a_connection_of_another_encoding_is_refused(server: Postgres, opened: Any) -> None:
    with (
        psycopg.connect(server.url, client_encoding="LATIN1") as connection,
        pytest.raises(ConfigurationError, match="client_encoding"),
    ):
        opened(connection)


def test_a_connection_that_breaks_is_replaced(server: Postgres, opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    with closing(psycopg.connect(server.url)) as connection:
        backend = opened(connection)
        slot = base(backend)
        server.run(f"select pg_terminate_backend({connection.info.backend_pid}, 9000)")
        for number in range(3):
            assert claim(backend, "job", slot + number, "a") is WON
        assert caplog.text.count("connections of our own") == 1


def test_a_connection_that_the_app_has_closed_is_not(server: Postgres, opened: Any) -> None:
    connection = psycopg.connect(server.url)
    backend = opened(connection)
    connection.close()
    error = raised_by(lambda: claim(backend, "job", 0, "a"))
    assert isinstance(error, BackendUnavailable) and "the app has closed it" in str(error)


@pytest.mark.parametrize("begin", ["event", "static"])
def test_an_engine_that_begins_by_itself(server: Postgres, begin: str, opened: Any) -> None:
    from sqlalchemy.pool import StaticPool

    options: dict[str, Any] = {"poolclass": StaticPool} if begin == "static" else {"isolation_level": "SERIALIZABLE"}
    engine = create_engine(server.url.replace("postgresql:", "postgresql+psycopg:"), **options)
    try:
        if begin == "event":
            event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("begin"))
        backend = opened(engine)
        slot = base(backend)
        assert claim(backend, "job", slot, "a") is WON
        assert claim(opened(), "job", slot, "b") is TAKEN
    finally:
        engine.dispose()


def test_a_dead_connection_of_a_pool_or_an_engine_is_not_used(server: Postgres, opened: Any) -> None:
    engine = create_engine(server.url.replace("postgresql:", "postgresql+psycopg:"))
    with psycopg_pool.ConnectionPool(server.url, min_size=2, open=True) as pool:
        try:
            for backend in (opened(engine), opened(pool), opened()):
                slot = base(backend)
                assert claim(backend, "job", slot, "a") is WON
                server.run(
                    "select pg_terminate_backend(pid, 9000) from pg_stat_activity"
                    " where usename = current_user and pid <> pg_backend_pid()"
                )
                assert claim(backend, "other", slot, "a") is WON
        finally:
            engine.dispose()
    error = raised_by(lambda: PostgresBackend(pool).open("app"))
    assert isinstance(error, ConfigurationError) and "keep it open" in str(error)


def test_what_is_nothing_of_the_kind_is_refused(server: Postgres) -> None:
    for wrong, words in (
        (create_engine("sqlite://"), "not PostgreSQL"),
        (5, "not builtins.int"),
        (psycopg_pool.AsyncConnectionPool(server.url, open=False), "asyncio"),
        ("postgresql://user:50%off@host/db", "escape special characters"),
        ("host=nowhere colour=red", "neither a URL"),
    ):
        with pytest.raises(ConfigurationError, match=words) as caught:
            PostgresBackend(wrong)
        assert "50%off" not in str(caught.value)


# --- URLs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["postgresql", "postgres", "sqla+postgresql", "db+postgresql"])
def test_forms_of_urls(server: Postgres, namespace: str, prefix: str) -> None:
    url = server.url.replace("postgresql", prefix)
    with closing(backend_from_url(f"{url}?table=s_{namespace}.runs&application_name=me%20too")) as backend:
        assert backend.namespace == f"s_{namespace}.runs"
        backend.open("app")
        with server.client() as client:
            query = "select count(*) from pg_stat_activity where application_name = 'me too'"
            assert client.execute(query).fetchone() == (1,)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://u:hidden@h/d?tabel=x", "did you mean 'table'"),
        ("postgresql://u:hidden@h/d?sslmod=x", "did you mean 'sslmode'"),
        ("postgresql+psycopg2://u:hidden@h/d", "without a driver"),
        ("postgresql://u:sec%ret@h/d", "escape"),
    ],
)
def test_urls_that_are_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        backend_from_url(url)
    assert "hidden" not in str(caught.value) and "sec%ret" not in str(caught.value)


def test_what_a_server_says_at_the_door(server: Postgres) -> None:
    for url, words in (
        (server.at(server.port, database="nowhere"), "make it, or name another"),
        (server.at(server.port, user="nobody_of_this_name"), "make it, or name another"),
    ):
        with closing(PostgresBackend(url)) as backend, pytest.raises(ConfigurationError, match=words):
            backend.open("app")
    with closing(PostgresBackend("postgresql://u:secret@127.0.0.1:1/d")) as backend:
        error = raised_by(lambda: backend.open("app"))
    assert isinstance(error, BackendUnavailable) and not isinstance(error, ConfigurationError)
    assert "secret" not in str(error) and "u@127.0.0.1:1/d" in str(error)


# --- contention -------------------------------------------------------------------------------------------------------


@pytest.mark.race
def test_batches_of_a_thousand_with_eight_contenders(server: Postgres, opened: Any) -> None:
    """In an order of their own each: no deadlock, and no error in the server's log, for those who lose either."""
    backends = [opened() for _ in range(8)]
    slot = base(backends[0])
    jobs = [f"job {number}" for number in range(1_000)]

    def contend(number: int, round_: int) -> list[Answer]:
        turn = number * 125
        mine = [*jobs[turn:], *jobs[:turn]][:: 1 if number % 2 else -1]
        return claim_all(backends[number], [ask(job, slot + round_, str(number)) for job in mine])

    with quiet_log(server):
        for round_ in range(3):
            answers = crowd(8, partial(contend, round_=round_))
            assert sum(row.count(WON) for row in answers) == 1_000
            assert sum(row.count(TAKEN) for row in answers) == 7_000


@pytest.mark.race
def test_sweepers_and_holders_of_the_same_claims(server: Postgres, namespace: str, opened: Any) -> None:
    """A takeover and a late confirm of many: each claim goes one way, and nobody waits for ever."""
    backends = [opened() for _ in range(6)]
    slot = base(backends[0])
    jobs = [f"job {number}" for number in range(300)]
    with quiet_log(server):
        for round_ in range(3):
            at = slot + round_
            assert set(claim_all(backends[0], [ask(job, at, "holder", lease=0) for job in jobs])) == {WON}

            def deed(number: int, at: Millis = at) -> list[Any]:
                mine = jobs[:: 1 if number % 2 else -1]
                if number == 0:
                    return claim_all(backends[0], [ask(job, at, "holder", lease=0) for job in mine])
                return backends[number].takeover(
                    [
                        Takeover(job=job, slot=at, from_attempt=1, owner=str(number), beat="b", lease=60_000)
                        for job in mine
                    ]
                )

            taken = [row.count(1) for row in crowd(6, deed)[1:]]
            # The holder may have renewed what nobody had taken yet, with a lease that was over at once.
            assert sum(taken) == 300


def test_a_beat_that_freezes_inside_a_transaction_keeps_nothing(
    server: Postgres, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, other = opened(), opened()
    slot = base(other)
    claim(other, "job", slot, "b")
    patience = postgres._IDLE_TIMEOUT
    error: BaseException | None = None
    monkeypatch.setattr(postgres, "_IDLE_TIMEOUT", 300)
    try:
        with frozen._writing() as connection:
            frozen._floors(connection, ["job"])
            # It says nothing more. What it holds is free when the server has lost its patience, with this one only.
            monkeypatch.setattr(postgres, "_IDLE_TIMEOUT", patience)
            assert claim(other, "job", slot + 1, "b") is WON
    except (BackendUnavailable, OutcomeUnknown) as caught:
        error = caught
    assert error is not None


def test_a_look_at_tables_that_somebody_keeps_locked_ends(
    server: Postgres, namespace: str, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A migration tool, or a VACUUM FULL, must not stop a beat for as long as it takes."""
    monkeypatch.setattr(postgres, "_LOCK_TIMEOUT", 200)
    with server.client() as lender, server.client() as locker:
        # On a connection of the app nothing else would end the wait.
        backends = opened(), opened(lender)
        looks: list[Callable[[PostgresBackend], Any]] = [
            lambda backend: backend.history("job", 10),
            lambda backend: backend.last_run("job"),
            lambda backend: backend.lapsed(10),
            lambda backend: backend.now(),
            lambda backend: backend.beats(60_000),
        ]
        with locker.transaction():
            for table in ("", "_meta", "_beats"):
                locker.execute(f"lock table {namespace}{table} in access exclusive mode")
            for backend in backends:
                for look in looks:
                    error = raised_by(lambda: look(backend))  # noqa: B023
                    assert isinstance(error, BackendUnavailable) and "kept the tables locked" in str(error)
        for backend in backends:
            assert [bool(look(backend)) for look in looks] == [False, False, False, True, False]


def test_the_number_of_statements_does_not_grow_with_the_batch(opened: Any) -> None:
    backend = opened()
    slot = base(backend)
    seen: list[str] = []
    event.listen(
        backend._source._engine, "before_cursor_execute", lambda _, __, statement, *___: seen.append(statement)
    )

    def statements(count: int, start: int) -> int:
        seen.clear()
        jobs = [f"job {number}" for number in range(start, start + count)]
        assert set(claim_all(backend, [ask(job, slot, "a") for job in jobs])) == {WON}
        assert set(claim_all(backend, [ask(job, slot, "b") for job in jobs])) == {TAKEN}
        return len(seen)

    statements(1, 0)
    assert statements(1, 1) == statements(500, 2)


# --- a server that goes -----------------------------------------------------------------------------------------------


def patiently(call: Callable[[], Any]) -> Any:
    """As a beat does: ask again, as the same owner, until there is an answer."""
    for _ in range(600):
        with suppress(BackendUnavailable, OutcomeUnknown):
            return call()
        threading.Event().wait(0.05)
    pytest.fail("it never answered again")


@pytest.mark.race
def test_connections_that_are_terminated_again_and_again(server: Postgres, opened: Any) -> None:
    backends = [opened() for _ in range(3)]
    slot = base(backends[0])
    over, answered = threading.Event(), []

    def terminate() -> None:
        query = "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'celery-anarchon%'"
        with server.client() as client:
            while not over.is_set():
                client.execute(query)
                before = len(answered)
                while len(answered) < before + 4 and not over.wait(0.001):
                    pass

    thread = threading.Thread(target=terminate)
    thread.start()
    try:
        answers = crowd(
            3,
            lambda number: [
                patiently(lambda at=at: claim(backends[number], "job", slot + at, str(number)))
                for at in range(60)
                if answered.append(at) is None
            ],
        )
    finally:
        over.set()
        thread.join()
    assert [[row[at] for row in answers].count(WON) for at in range(60)] == [1] * 60


def test_claims_survive_kill_9_of_the_server(server: Postgres, opened: Any) -> None:
    backend = opened()
    slot = base(backend)
    won: list[Millis] = []
    enough = threading.Event()

    def claim_on() -> None:
        with suppress(BackendUnavailable, OutcomeUnknown):
            for number in range(1_000_000):
                if claim(backend, "job", slot + number, "a") is WON:
                    won.append(slot + number)
                    if len(won) == 50:
                        enough.set()

    thread = threading.Thread(target=claim_on)
    thread.start()
    assert enough.wait(60)
    server.kill()
    thread.join()
    server.process.start()
    server.wait_until_ready()
    assert set(claim_all(opened(), [ask("job", at, "b") for at in won])) == {TAKEN}


def test_a_server_that_hangs_is_unavailable(server: Postgres, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pgconnections, "CALL_TIMEOUT", 0.5)
    backend = opened()
    slot = base(backend)
    frozen = server.freeze()
    try:
        error = raised_by(lambda: claim(backend, "job", slot, "a"))
    finally:
        server.thaw(frozen)
    assert isinstance(error, BackendUnavailable) and "no answer within" in str(error)
    assert patiently(lambda: claim(backend, "job", slot, "a")) is WON


def test_it_shows_its_name_on_the_server(server: Postgres, opened: Any) -> None:
    backend = opened()
    with server.client() as client:
        query = "select count(*) from pg_stat_activity where application_name = %s"
        assert client.execute(query, (f"celery-anarchon:{os.getpid()}",)).fetchone() >= (1,)
    backend.close()
