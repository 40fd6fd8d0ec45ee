from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from conformance.postgres_harness import OverConnection, OverEngine, OverPool, PostgresHarness
from support.postgres_servers import pgbouncer, private_postgres

from celery_anarchon.testing import RunSuite


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One server for all; each test has tables of its own."""
    with private_postgres(tmp_path_factory.mktemp("postgres")) as running:
        PostgresHarness.server = running
        yield running


@pytest.fixture(scope="module")
def bouncer(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pgbouncer(tmp_path_factory.mktemp("pgbouncer"), server) as running:
        Pooled.port = running.port
        yield


class Direct(PostgresHarness):
    pass


class ByEngine(PostgresHarness):
    backend = OverEngine


class ByConnection(PostgresHarness):
    backend = OverConnection


class ByPool(PostgresHarness):
    backend = OverPool


class Pooled(PostgresHarness):
    pass


class Smaller:
    race_threads: ClassVar[int] = 8
    race_slots: ClassVar[int] = 10
    race_processes: ClassVar[tuple[int, int]] = (3, 2)


class TestPostgres(RunSuite):
    harness_class = Direct
    race_threads: ClassVar[int] = 20
    race_slots: ClassVar[int] = 30
    race_processes: ClassVar[tuple[int, int]] = (4, 5)


class TestEngine(Smaller, RunSuite):
    harness_class = ByEngine


class TestConnection(Smaller, RunSuite):
    harness_class = ByConnection


class TestPool(Smaller, RunSuite):
    harness_class = ByPool


@pytest.mark.usefixtures("bouncer")
class TestPgBouncer(Smaller, RunSuite):
    """In transaction mode, with two connections for everybody."""

    harness_class = Pooled
