"""Crews: real beats and workers on a store and a broker of the test's own; each test on stores and pools by turns."""

from __future__ import annotations

import os
import sqlite3
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from servers import RedisServer, redis_server
from support.crew import Crew
from support.postgres_servers import Postgres, private_postgres

from celery_anarchon.testing.faults import Proxy

STORES = ["redis", "sqlite", "postgres"]
OTHER_POOLS = ["threads", "gevent", "solo"]
LONG = os.environ.get("ANARCHON_PROFILE") == "long"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test on each store and pool; in the short form on one store and, with prefork, on one of the other pools, by
    its name, so that each has its share."""
    share = zlib.crc32(metafunc.function.__name__.encode())
    names = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    given = {name for some in names for name in (some.split(",") if isinstance(some, str) else some)}
    if "store_kind" in metafunc.fixturenames and "store_kind" not in given:
        metafunc.parametrize("store_kind", STORES if LONG else [STORES[share % len(STORES)]], indirect=True)
    if "pool" in metafunc.fixturenames and "pool" not in given:
        others = (
            OTHER_POOLS
            if LONG
            else [OTHER_POOLS[zlib.crc32(f"pool of {metafunc.function.__name__}".encode()) % len(OTHER_POOLS)]]
        )
        metafunc.parametrize("pool", ["prefork", *others])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the long form all of them are long: it is the form on every store and pool that "tox -e long" is to run."""
    for item in items:
        if LONG and "store_kind" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("crew-redis"), private=True) as server:
        yield server


@pytest.fixture(scope="session")
def redis_stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """For tests that take the store away and leave the broker."""
    with redis_server(tmp_path_factory.mktemp("crew-store"), private=True) as server:
        yield server


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    with private_postgres(tmp_path_factory.mktemp("crew-postgres")) as server:
        yield server


@pytest.fixture
def store_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def crew(store_kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Crew]]:
    """A crew on that kind of store: ``crew(jobs=..., settings=..., anarchon=...)``. *apart*: the store is not on the
    broker's server, and can be taken away. *refuses*: it then refuses connections, instead of being silent; a file is
    locked all the same."""
    broker: RedisServer = request.getfixturevalue("brokers")
    with ExitStack() as stack:

        def build(*, apart: bool = False, refuses: bool = False, **given: Any) -> Crew:
            away: Callable[[], AbstractContextManager[None]]
            if store_kind == "redis":
                server: RedisServer = request.getfixturevalue("redis_stores") if apart else broker
                place, away = f"{server.url[:-1]}1", lambda: _paused(server)
                url, other = (f"{place}?prefix={kind}{tmp_path.name}:" for kind in ("", "other-"))
            elif store_kind == "sqlite":
                url, away = f"sqlite:///{tmp_path}/anarchon.db", lambda: _locked(tmp_path / "anarchon.db")
                other = f"{url}?table=other"
            else:
                database: Postgres = request.getfixturevalue("databases")
                place, away = database.url, lambda: _frozen(database)
                url, other = (f"{place}?table={kind}_{uuid.uuid4().hex[:12]}" for kind in ("crew", "other"))
            if refuses and store_kind != "sqlite":
                port = urlsplit(place).port
                assert port is not None
                line = stack.enter_context(Proxy(port))
                url, away = url.replace(f":{port}/", f":{line.port}/"), lambda: _cut(line)
            built = Crew(tmp_path, url, broker.url, away=away, other=other, **given)
            with built.app().connection_for_write() as connection:
                connection.default_channel.client.flushdb()
            stack.callback(built.close)
            return built

        yield build


@contextmanager
def _paused(server: RedisServer) -> Iterator[None]:
    server.process.pause()
    try:
        yield
    finally:
        server.process.resume()


@contextmanager
def _cut(line: Proxy) -> Iterator[None]:
    line.cut()
    try:
        yield
    finally:
        line.mend()


@contextmanager
def _frozen(server: Postgres) -> Iterator[None]:
    processes = server.freeze()
    try:
        yield
    finally:
        server.thaw(processes)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Whoever wants to write waits for its busy timeout, in vain."""
    with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as raw:
        raw.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            raw.execute("ROLLBACK")
