"""PostgreSQL, SQLite, libSQL, RabbitMQ and NATS: each option of theirs, by object and by URL, set to what is no
default, and what it does."""

from __future__ import annotations

import json
import sqlite3
import ssl
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kombu.connection import Connection
from servers import Server, free_port
from support.certificates import certificate
from support.columns import Servers
from support.nats_servers import binary, with_accounts
from support.own_options import Cases, claim, of_constructor, of_url, opened, query
from support.waiting import wait_for

from celery_anarchon import MemoryBackend, NatsBackend, PostgresBackend, RabbitMQBackend, SqliteBackend
from celery_anarchon.backends.memory import MemoryStore
from celery_anarchon.backends.pgconnections import libpq_options
from celery_anarchon.backends.rabbitmq.claims import Names
from celery_anarchon.backends.registry import backend_from
from celery_anarchon.errors import AnarchonError, BackendUnavailable, ConfigurationError
from celery_anarchon.model import Answer
from celery_anarchon.testing.clock import ManualClock
from celery_anarchon.testing.faults import Proxy
from celery_anarchon.testing.harness import raised_by

CASES = Cases()
WON = Answer.WON


def fresh() -> str:
    return f"t{uuid.uuid4().hex[:12]}"


class Bench:
    def __init__(self, servers: Servers, folder: Path) -> None:
        self.servers = servers
        self.folder = folder

    def by_object_and_url(self, kind: Any, url: str, *given: Any, **options: Any) -> Iterator[Any]:
        """Not opened yet. What the URL's query says is what the constructor is given, as text."""
        yield kind(*given, **options)
        yield backend_from(f"{url}?{query(options)}" if options else url)


def early(make: Callable[..., Any]) -> None:
    """Of the object alone: in a URL's place stands anarchon_early_tolerance."""
    for tolerance, answer in ((600_000, WON), (5_000, Answer.TOO_EARLY)):
        with opened(make(early_tolerance=tolerance)) as backend:
            assert claim(backend, 300_000)[0] is answer


# --- PostgreSQL -------------------------------------------------------------------------------------------------------


def rows(server: Any, statement: str) -> list[Any]:
    with server.client() as client:
        return list(client.execute(statement).fetchall())


@CASES.add("postgres", "connection", "table")
def _(bench: Bench) -> None:
    server = bench.servers.postgres
    schema = fresh()
    for number, backend in enumerate(
        bench.by_object_and_url(PostgresBackend, server.url, server.url, table=f"{schema}.runs")
    ):
        with opened(backend):
            assert claim(backend, job=f"job {number}")[0] is WON
            assert rows(server, f"select count(*) from {schema}.runs") == [(number + 1,)]


@CASES.add("postgres", "early_tolerance")
def _(bench: Bench) -> None:
    table = fresh()
    early(lambda **more: PostgresBackend(bench.servers.postgres.url, table=table, **more))


@CASES.add("postgres", "application_name")
def _(bench: Bench) -> None:
    """As every word of libpq: it is handed on."""
    server = bench.servers.postgres
    text = f"{server.url}?application_name=beat-of-billing"
    for backend in (PostgresBackend(text, table=fresh()), backend_from(f"{text}&table={fresh()}")):
        with opened(backend):
            named = "select count(*) from pg_stat_activity where application_name = 'beat-of-billing'"
            assert rows(server, named) == [(1,)]
        # A session is seen until its process has ended.
        wait_for(lambda named=named: rows(server, named) == [(0,)], "the end of the session")


# --- SQLite and libSQL ------------------------------------------------------------------------------------------------


class Counting:
    """A clock of a second for each look at it: how often one looks tells how long one would have waited."""

    def __init__(self) -> None:
        self.looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return float(self.looks)


@CASES.add("sqlite", "database", "table")
def _(bench: Bench) -> None:
    for name in ("by object", "by url"):
        path = bench.folder / f"{name}.db"
        made = SqliteBackend(path, table="billing_runs") if "object" in name else None
        with opened(made or backend_from(f"sqlite:///{path}?table=billing_runs")) as backend:
            assert claim(backend)[0] is WON
        with closing(sqlite3.connect(path)) as raw:
            assert raw.execute("select count(*) from billing_runs").fetchone() == (1,)


@CASES.add("sqlite", "busy_timeout")
def _(bench: Bench) -> None:
    path = bench.folder / "store.db"
    for backend in (
        SqliteBackend(path, busy_timeout=0.03),
        backend_from(f"sqlite:///{path}?busy_timeout=30ms"),
        SqliteBackend(path, busy_timeout=9),
        backend_from(f"sqlite:///{path}?busy_timeout=9s"),
    ):
        with opened(backend), closing(sqlite3.connect(path, isolation_level=None)) as other:
            clock = backend._clock_here = Counting()  # type: ignore[attr-defined]
            slot = backend.now()
            clock.looks = 0
            other.execute("BEGIN IMMEDIATE")
            step = lambda backend=backend: backend._patiently(_busy)  # noqa: E731
            assert raised_by(step) is not None
            # Once for the deadline, and then until it is reached: 9 times, or once.
            assert clock.looks == 1 + round(max(1, backend.busy_timeout))
            if backend.busy_timeout < 1:
                # With the wait of the driver itself, and a lock that is really held.
                assert isinstance(raised_by(lambda backend=backend: claim(backend)), BackendUnavailable)
            other.execute("ROLLBACK")
            assert backend.now() >= slot


def _busy() -> None:
    from sqlalchemy.exc import OperationalError

    raise OperationalError("BEGIN IMMEDIATE", None, sqlite3.OperationalError("database is locked"))


@CASES.add("sqlite", "early_tolerance")
def _(bench: Bench) -> None:
    early(lambda **more: SqliteBackend(bench.folder / "store.db", **more))


@CASES.add("libsql", "database", "table", "auth_token")
def _(bench: Bench) -> None:
    """The server asks for no token; what was sent is read on the line."""
    server = bench.servers.sqld
    asked: list[bytes] = []
    table = fresh()
    with Proxy(server.port, may_lose=lambda sent, _reply: bool(asked.append(sent))) as line:
        line.losing = True
        url = f"libsql+http://127.0.0.1:{line.port}"
        for number, backend in enumerate(
            bench.by_object_and_url(SqliteBackend, url, url, table=table, auth_token="hush")
        ):
            asked.clear()
            with opened(backend):
                assert claim(backend, job=f"job {number}")[0] is WON
            assert any(b"authorization: bearer hush" in sent.lower() for sent in asked)
            assert server.ask(f"select count(*) as n from {table}") == [{"n": str(number + 1)}]


@CASES.add("libsql", "busy_timeout")
def _(bench: Bench) -> None:
    for backend in bench.by_object_and_url(
        SqliteBackend, bench.servers.sqld.url, bench.servers.sqld.url, busy_timeout="9s"
    ):
        with closing(backend):
            clock = backend._clock_here = Counting()  # type: ignore[attr-defined]
            assert raised_by(lambda backend=backend: backend._patiently(_busy)) is not None
            assert clock.looks == 1 + 9


@CASES.add("libsql", "early_tolerance")
def _(bench: Bench) -> None:
    table = fresh()
    early(lambda **more: SqliteBackend(bench.servers.sqld.url, table=table, **more))


# --- RabbitMQ ---------------------------------------------------------------------------------------------------------


@CASES.add("rabbitmq", "url", "prefix", "slot_ttl", "strategy")
def _(bench: Bench) -> None:
    server = bench.servers.rabbitmq_tls
    prefix = f"{fresh()}."
    names = Names(prefix)
    options = {"prefix": prefix, "slot_ttl": "10m", "strategy": "stream"}
    for number, backend in enumerate(bench.by_object_and_url(RabbitMQBackend, server.url, server.url, **options)):
        with opened(backend):
            assert claim(backend, job=f"job {number}")[0] is WON
        wait_for(lambda count=number + 1: len(server.stream(names.claims)) == count, "the claim in its log")
        charter = json.loads(wait_for(lambda: server.stream(names.meta), "the charter")[0])
        assert "600000" in json.dumps(charter) and "stream" in json.dumps(charter)


@CASES.add("rabbitmq", "connection")
def _(bench: Bench) -> None:
    """A URL names where it leads to."""
    server = bench.servers.rabbitmq_tls
    prefix = f"{fresh()}."
    with Connection(server.url) as client:
        for backend in (
            RabbitMQBackend(connection=client, prefix=prefix),
            backend_from(f"{server.url}?prefix={prefix}"),
        ):
            with opened(backend):
                answer, slot = claim(backend)
                assert answer is WON
                assert server.messages(Names(prefix).slot("job", slot)) == 1
        assert not client.connected


@CASES.add("rabbitmq", "early_tolerance")
def _(bench: Bench) -> None:
    # What is looked at is this host's clock.
    early(lambda **more: RabbitMQBackend(bench.servers.rabbitmq_tls.url, prefix=fresh(), slot_ttl="2h", **more))


@CASES.add("rabbitmq", "ssl", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")
def _(bench: Bench) -> None:
    """A server that speaks to clients with its own certificate only."""
    tls = bench.servers.rabbitmq_tls
    place, mine, other = tls.tls_port, tls.mine, tls.other
    plain, secure = f"amqp://guest:guest@127.0.0.1:{place}//", f"amqps://guest:guest@127.0.0.1:{place}//"
    files = {"ssl_ca_certs": mine, "ssl_certfile": tls.beat, "ssl_keyfile": tls.beats_key}

    def works(*made: Any) -> None:
        for backend in made:
            with opened(backend):
                assert claim(backend)[0] is WON

    def fails(*made: Any) -> None:
        for backend in made:
            assert isinstance(raised_by(lambda backend=backend: backend.open("app")), AnarchonError)
            backend.close()

    def both(url: str, **options: Any) -> tuple[Any, Any]:
        given = {name: ssl.CERT_NONE if value == "none" else str(value) for name, value in options.items()}
        by_object = RabbitMQBackend(url, ssl=given, prefix=fresh())
        return by_object, backend_from(f"{url}?{query({**options, 'prefix': fresh()})}")

    works(*both(secure, **files))
    works(*both(plain, **files))
    fails(*both(secure, ssl_ca_certs=mine))
    fails(*both(secure, **{**files, "ssl_ca_certs": other}))
    works(*both(secure, **{**files, "ssl_ca_certs": other, "ssl_cert_reqs": "none"}))
    # True: with the machine's own authorities, which do not know this certificate.
    for backend in (RabbitMQBackend(plain, ssl=True), backend_from(f"{plain}?ssl=true")):
        assert "certificate" in str(raised_by(lambda backend=backend: backend.open("app"))).lower()
        backend.close()
    for wrong in (
        lambda: RabbitMQBackend(secure, ssl={"keyfile": tls.beats_key}),
        lambda: backend_from(f"{secure}?ssl_keyfile=k"),
    ):
        with pytest.raises(ConfigurationError, match="ssl_keyfile goes with ssl_certfile"):
            wrong()


# --- NATS -------------------------------------------------------------------------------------------------------------


@CASES.add("nats", "servers", "stream", "prefix", "duplicate_window", "history_size")
def _(bench: Bench) -> None:
    server = bench.servers.nats
    stream = fresh()
    options = {"stream": stream, "prefix": f"{stream}.billing.", "duplicate_window": "10m", "history_size": 1_500}
    for number, backend in enumerate(bench.by_object_and_url(NatsBackend, server.url, server.url, **options)):
        with opened(backend):
            assert claim(backend, job=f"job {number}")[0] is WON
        claims = server.api(f"STREAM.INFO.{stream}")
        assert claims["state"]["messages"] == number + 1
        assert claims["config"]["subjects"] == [f"{stream}.billing.claim.>"]
        assert claims["config"]["duplicate_window"] == 600 * 10**9
        assert server.api(f"STREAM.INFO.{stream}_HISTORY")["config"]["max_msgs_per_subject"] == 1_500


@CASES.add("nats", "replicas")
def _(bench: Bench) -> None:
    """A server that is alone has no place for a second copy. On a cluster: test_nats.py."""
    server = bench.servers.nats
    for backend in bench.by_object_and_url(NatsBackend, server.url, server.url, replicas=3, stream=fresh()):
        with closing(backend), pytest.raises(ConfigurationError, match="replicas"):
            backend.open("app")


@CASES.add("nats", "connection")
def _(bench: Bench) -> None:
    """A URL names where it leads to. What a client of the app may be: test_nats.py."""
    import asyncio
    import threading

    import nats

    server, stream = bench.servers.nats, fresh()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        client = asyncio.run_coroutine_threadsafe(nats.connect(server.url, pending_size=-1), loop).result(30)
        options = {"stream": stream, "prefix": f"{stream}."}
        for number, backend in enumerate(
            (NatsBackend(connection=client, **options), backend_from(f"{server.url}?{query(options)}"))
        ):
            with opened(backend):
                assert claim(backend, job=f"job {number}")[0] is WON
            assert server.api(f"STREAM.INFO.{stream}")["state"]["messages"] == number + 1
        assert client.is_connected
        asyncio.run_coroutine_threadsafe(client.close(), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@CASES.add("nats", "early_tolerance")
def _(bench: Bench) -> None:
    def make(**more: Any) -> NatsBackend:
        stream = fresh()
        return NatsBackend(bench.servers.nats.url, stream=stream, prefix=f"{stream}.", duplicate_window="2h", **more)

    early(make)


@CASES.add("nats", "credentials")
def _(bench: Bench) -> None:
    """A server that knows accounts by their signatures, and lets nobody else in."""
    port = free_port()
    server = Server([binary(), "-c", str(with_accounts(bench.folder, port))], port, bench.folder)
    server.start()
    try:
        url = f"nats://127.0.0.1:{port}"
        for number, backend in enumerate(
            bench.by_object_and_url(NatsBackend, url, url, credentials=bench.folder / "beat.creds")
        ):
            with opened(backend):
                assert claim(backend, job=f"job {number}")[0] is WON
        with closing(NatsBackend(url)) as nobody, pytest.raises(ConfigurationError, match=r"(?i)authorization"):
            nobody.open("app")
    finally:
        server.kill()


@CASES.add("nats", "tls", "tls_ca", "tls_cert", "tls_key")
def _(bench: Bench) -> None:
    """A server that speaks to clients with its own certificate only."""
    (mine, key), (other, _) = certificate(bench.folder, "mine"), certificate(bench.folder, "other")
    port = free_port()
    files = ["--tlsverify", "--tlscert", str(mine), "--tlskey", str(key), "--tlscacert", str(mine)]
    command = [binary(), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(bench.folder / "data"), *files]
    server = Server(command, port, bench.folder)
    server.start()
    try:
        url = f"tls://127.0.0.1:{port}"

        def both(**paths: Any) -> tuple[Any, Any]:
            return NatsBackend(url, tls=paths), backend_from(
                f"{url}?{query({f'tls_{k}': v for k, v in paths.items()})}"
            )

        for backend in both(ca=mine, cert=mine, key=key):
            with opened(backend):
                assert claim(backend, job=fresh())[0] is WON
        for backend in (*both(ca=mine), *both(ca=other, cert=mine, key=key)):
            with closing(backend):
                assert isinstance(raised_by(lambda backend=backend: backend.open("app")), AnarchonError)
        for wrong in (lambda: NatsBackend(url, tls={"key": key}), lambda: backend_from(f"{url}?tls_key={key}")):
            with pytest.raises(ConfigurationError, match="key goes with cert"):
                wrong()
    finally:
        server.kill()


# --- memory -----------------------------------------------------------------------------------------------------------


@CASES.add("memory", "namespace", "store", "clock", "early_tolerance")
def _(bench: Bench) -> None:
    """A URL names its store by what stands behind the scheme; the clock belongs to the store."""
    clock = ManualClock(wall=1_774_746_000_000)
    store, place = MemoryStore(clock), fresh()
    for backend, other in (
        (MemoryBackend("billing", store=store), MemoryBackend("reports", store=store)),
        (backend_from(f"memory://{place}?namespace=billing"), backend_from(f"memory://{place}?namespace=reports")),
    ):
        with opened(backend), opened(other):
            answer, _ = claim(backend)
            assert answer is WON and len(backend.history("job", 5)) == 1 and not other.history("job", 5)
    assert MemoryBackend(clock=clock).now() == clock.wall()
    early(lambda **more: MemoryBackend(clock=clock, **more))


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(servers: Servers, tmp_path: Path) -> Bench:
    return Bench(servers, tmp_path)


@pytest.mark.parametrize("case", CASES.parameters())
def test_option(case: Callable[[Bench], None], bench: Bench) -> None:
    case(bench)


def test_credentials_without_what_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nkeys", None)
    with pytest.raises(ConfigurationError, match=r"credentials=.* needs the package nkeys: pip install"):
        NatsBackend(credentials="/run/secrets/beat.creds")


def test_no_option_is_without_a_case() -> None:
    assert CASES.options("postgres") - {"application_name"} == of_constructor(PostgresBackend)
    assert of_url("postgresql://db") == {"table", *libpq_options()}
    own = of_constructor(SqliteBackend)
    assert CASES.options("libsql") == own
    assert CASES.options("sqlite") == own - {"auth_token"}
    assert of_url("sqlite:///a.db") == {"table", "busy_timeout"}
    assert of_url("libsql://db") == {"table", "busy_timeout", "auth_token"}
    assert CASES.options("memory") == of_constructor(MemoryBackend)
    assert of_url("memory://here") == {"namespace"}
    for store, kind, url in (("rabbitmq", RabbitMQBackend, "amqp://mq"), ("nats", NatsBackend, "nats://mq")):
        assert CASES.options(store) == of_constructor(kind) | of_url(url)
