from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.rabbitmq_servers import RabbitServer, rabbitmq_server


@pytest.fixture(scope="session")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    """A RabbitMQ that the fleets of this run share, each with a queue of its own. Do not stop it."""
    with rabbitmq_server(tmp_path_factory.mktemp("rabbitmq")) as server:
        yield server
