"""Redis servers of these tests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.redis_servers import Cluster, Private, cluster, private_server


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Private]:
    """A Redis of this test alone."""
    with private_server(tmp_path / "own") as running:
        yield running


@pytest.fixture
def prefix() -> str:
    return f"t{uuid.uuid4().hex[:10]}:"
