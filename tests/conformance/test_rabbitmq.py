from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from conformance.rabbitmq_harness import QueueHarness, StreamHarness
from support.rabbitmq_servers import rabbitmq_server, wanted

from celery_anarchon.testing import ClaimSuite


@pytest.fixture(scope="class", autouse=True)
def server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One server for all tests of a class; each test has a prefix of its own."""
    with rabbitmq_server(tmp_path_factory.mktemp("rabbitmq")) as running:
        request.cls.harness_class.server = running
        yield


class Smaller:
    """A connection to RabbitMQ costs the server some twenty processes."""

    race_threads: ClassVar[int] = 8
    race_slots: ClassVar[int] = 30
    race_processes: ClassVar[tuple[int, int]] = (4, 2)


if wanted():

    class TestQueue(Smaller, ClaimSuite):
        harness_class = QueueHarness

    class TestStream(Smaller, ClaimSuite):
        harness_class = StreamHarness
