from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from support.nats_servers import nats_cluster, nats_server, wanted

from celery_anarchon.testing import ClaimSuite


@pytest.fixture(scope="class", autouse=True)
def server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One server, or cluster, for all tests of a class; each test has streams of its own."""
    folder = tmp_path_factory.mktemp("nats")
    with (nats_cluster if request.cls.clustered else nats_server)(folder) as running:
        request.cls.harness_class.server = running
        yield


if wanted():
    from conformance.nats_harness import ClusterHarness, NatsHarness

    class TestNats(ClaimSuite):
        harness_class = NatsHarness
        clustered: ClassVar[bool] = False
        race_threads: ClassVar[int] = 20

    class TestCluster(ClaimSuite):
        harness_class = ClusterHarness
        clustered: ClassVar[bool] = True
        race_threads: ClassVar[int] = 8
        race_slots: ClassVar[int] = 30
        race_processes: ClassVar[tuple[int, int]] = (4, 2)
