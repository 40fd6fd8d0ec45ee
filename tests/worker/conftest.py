"""Crews: real beats and workers on a store and a broker of the test's own."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from servers import RedisServer, redis_server
from support.crew import Crew
from support.postgres_servers import Postgres, private_postgres

STORES = ["redis", "sqlite", "postgres"]


@pytest.fixture(scope="session")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("crew-redis"), private=True) as server:
        yield server


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    with private_postgres(tmp_path_factory.mktemp("crew-postgres")) as server:
        yield server


@pytest.fixture(params=STORES)
def store_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def crew(store_kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Crew]]:
    """A crew on that kind of store: ``crew(jobs=..., settings=..., anarchon=...)``."""
    broker: RedisServer = request.getfixturevalue("brokers")
    with ExitStack() as stack:

        def build(**given: Any) -> Crew:
            url = {
                "redis": f"{broker.url[:-1]}1?prefix={tmp_path.name}:",
                "sqlite": f"sqlite:///{tmp_path}/anarchon.db",
            }.get(store_kind)
            if url is None:
                url = f"{request.getfixturevalue('databases').url}?table=crew_{uuid.uuid4().hex[:12]}"
            built = Crew(tmp_path, url, broker.url, **given)
            with built.app().connection_for_write() as connection:
                connection.default_channel.client.flushdb()
            stack.callback(built.close)
            return built

        yield build
