from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.rabbitmq_servers import RabbitServer, rabbitmq_server
from support.sites import Broker, FilesBroker, RabbitBroker, RedisBroker, RedisStore, SqliteStore, Store
from support.stage import SITES, Stage


@pytest.fixture(scope="session")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    """A RabbitMQ that the fleets of this run share, each with a queue of its own. Do not stop it."""
    with rabbitmq_server(tmp_path_factory.mktemp("rabbitmq")) as server:
        yield server


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    site = getattr(request, "param", SITES[0])
    home: Callable[[Path], Store] = SqliteStore
    broker: Callable[[Path], Broker] = FilesBroker
    if site != SITES[0]:
        server = request.getfixturevalue("redis")
        home, broker = lambda _: RedisStore(server.url), lambda _: RedisBroker(server.url)
    if site == SITES[2]:
        node = request.getfixturevalue("rabbitmq")
        broker = lambda _: RabbitBroker(node)  # noqa: E731
    stage = Stage(tmp_path, home, broker)
    yield stage
    for fleet in stage.fleets:
        fleet.fleet.close()
